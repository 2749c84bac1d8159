"""What this library replaces in DeepSpeed is there; what moves is named."""

from __future__ import annotations

import inspect
import warnings

import pytest

pytest.importorskip("deepspeed")

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

from dos.errors import IntegrationError
from dos.integrations import zero3_seams as seams
from dos.integrations.zero3_optimizer import DOSZeroOptimizer_Stage3


class Moved(Stage3):  # type: ignore[misc]
    """A later version, as it might be."""

    def _optimizer_step(self, sub_group_id: int, closure: object = None) -> None:
        """With an argument more."""

    destroy = None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Stage3, seams.OPTIMIZER_SEAMS),
        (DeepSpeedEngine, seams.ENGINE_SEAMS),
        (DeepSpeedConfig, seams.CONFIG_SEAMS),
    ],
)
def test_every_seam_is_as_known(kind: type, expected: dict[str, tuple[str, ...]]) -> None:
    assert seams.moved_seams(kind, expected) == []


def test_every_seam_that_only_some_versions_have_is_as_known() -> None:
    assert seams.moved_seams(Stage3, seams.OPTIONAL_SEAMS, optional=True) == []


def test_all_that_is_replaced_is_a_known_seam() -> None:
    replaced = {
        name
        for name, member in vars(DOSZeroOptimizer_Stage3).items()
        if inspect.isfunction(member) and hasattr(Stage3, name)
    }
    # Upstream's arguments are passed on as they come.
    assert (
        replaced - {"load_state_dict"} <= {**seams.OPTIMIZER_SEAMS, **seams.OPTIONAL_SEAMS}.keys()
    )


def test_a_seam_that_moved_is_named() -> None:
    moved = seams.moved_seams(Moved, seams.OPTIMIZER_SEAMS)
    assert [
        name for name in seams.OPTIMIZER_SEAMS if any(f".{name} " in text for text in moved)
    ] == [
        "_optimizer_step",
        "destroy",
    ]


def test_a_deepspeed_with_a_moved_seam_is_refused_with_its_name() -> None:
    moved = seams.moved_seams(Moved, seams.OPTIMIZER_SEAMS)
    with pytest.raises(IntegrationError, match=r"_optimizer_step takes .*closure"):
        seams.check_seams("0.20.0", moved)


@pytest.mark.parametrize("version", ["0.17.6", "0.20.0"])
def test_a_version_outside_of_the_range_is_warned_about(version: str) -> None:
    with pytest.warns(UserWarning, match=version):
        seams.check_version(version)


@pytest.mark.parametrize("version", ["0.18.0", "0.19.6+abc", deepspeed.__version__])
def test_a_version_in_the_range_is_not_warned_about(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seams.check_version(version)
