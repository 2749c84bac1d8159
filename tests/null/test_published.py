"""The published code as it was measured: its order of work, and its times."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from dos.errors import ConfigError
from perfmodel.profile import H100_NODE, NodeProfile, PublishedCode
from perfmodel.published import Schedule, simulate_published
from perfmodel.published_runs import Row, predict_row, read_rows

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
ROWS = read_rows(EXPERIMENTS / "data" / "paper_runs.json")
NODES = {
    name: NodeProfile.load(EXPERIMENTS / "profiles" / f"{name}.json") for name in ("a100", "h100")
}

# Round figures: a host update of 1 s per subgroup, copies of 0.25 s, a device update of 0.125 s.
NUMEL = 2**20
CODE = PublishedCode(
    host_params_per_s=NUMEL,
    host_bytes_per_param=28.0,
    cast_s_per_param=0.5 / NUMEL,
    launch_s=0.0,
    casts=False,
    streams=1,
    tail="if_ragged",
)
NODE = replace(
    H100_NODE,
    h2d_bytes_per_s=4 * 12.0 * NUMEL,
    d2h_bytes_per_s=4 * 12.0 * NUMEL,
    device_params_per_s=8.0 * NUMEL,
    published=CODE,
)


def step_s(
    count: int,
    schedule: Schedule,
    stride: int | None = None,
    resident_ratio: float = 0.0,
    **code: object,
) -> float:
    node = replace(NODE, published=replace(CODE, **code))  # type: ignore[arg-type]
    return simulate_published(
        node, [NUMEL] * count, schedule=schedule, stride=stride, resident_ratio=resident_ratio
    )[1]


def test_the_baseline_waits_for_every_cast() -> None:
    assert step_s(4, "zero-offload") == pytest.approx(4 * 1.5)


def test_residents_are_the_last_subgroups_and_cost_a_device_update() -> None:
    assert step_s(10, "twin-flow", resident_ratio=0.2) == pytest.approx(8 * 1.5 + 2 * 0.125)


@pytest.mark.parametrize(("count", "ratio", "on_host"), [(31, 0.2, 24), (31, 0.4, 18), (10, 1, 0)])
def test_the_offloaded_share_is_rounded_down(count: int, ratio: float, on_host: int) -> None:
    expected = 1.5 * on_host + 0.125 * (count - on_host)
    assert step_s(count, "twin-flow", resident_ratio=ratio) == pytest.approx(expected)


def test_where_the_stride_divides_the_count_the_last_flush_is_never_made() -> None:
    assert step_s(4, "dos-paper", 2) == pytest.approx(2 * (1 + 0.125))


def test_else_the_host_waits_for_the_last_flush() -> None:
    assert step_s(5, "dos-paper", 2) == pytest.approx(2 * (1 + 0.125) + 0.25 + 1)


def test_or_leaves_it_to_itself() -> None:
    assert step_s(5, "dos-paper", 2, tail="never") == pytest.approx(2 * (1 + 0.125) + 1)


def test_at_stride_one_nothing_overlaps_on_one_stream() -> None:
    # Each subgroup: fetched, updated; its flush comes before the next fetch.
    assert step_s(3, "dos-paper", 1) == pytest.approx(3 * (0.25 + 0.125) + 2 * 0.25)


def test_on_three_streams_an_array_is_fetched_while_the_next_is_flushed() -> None:
    assert step_s(3, "dos-paper", 1, streams=3) == pytest.approx(
        3 * 0.125 + 0.25 + 2 * 0.25 * 4 / 3
    )


def test_the_stride_counts_residents_too() -> None:
    # On the host are 0 to 3, of which 2 is streamed; 5 would be next, and is resident.
    expected = 3 * 1 + 0.125 + 0.25 + 2 * 0.125
    assert step_s(6, "dos-paper", 3, resident_ratio=1 / 3) == pytest.approx(expected)


def test_a_stride_beyond_the_count_streams_nothing() -> None:
    assert step_s(4, "dos-paper", 5) == pytest.approx(4.0)


def test_no_subgroup_takes_no_time() -> None:
    assert step_s(0, "zero-offload") == 0.0


@pytest.mark.parametrize(
    ("schedule", "stride", "where"),
    [("dos-paper", None, "stride"), ("twin-flow", 2, "stride"), ("dos-paper", 0, "stride")],
)
def test_a_stride_that_the_schedule_lacks_is_refused(
    schedule: Schedule, stride: int | None, where: str
) -> None:
    with pytest.raises(ConfigError, match=where):
        step_s(4, schedule, stride)


def test_a_node_without_fitted_figures_is_refused() -> None:
    with pytest.raises(ConfigError, match="perfmodel fit"):
        simulate_published(H100_NODE, [1], schedule="zero-offload")


def errors(machine: str, *schedules: str) -> list[float]:
    """Absolute relative errors of the shipped profile on rows that it was fitted to."""
    return [
        abs(predict_row(NODES[machine], row) / row.step_s - 1)
        for row in ROWS
        if row.machine == machine and row.schedule in (schedules or (row.schedule,))
    ]


@pytest.mark.parametrize(("machine", "most"), [("a100", 0.012), ("h100", 0.012)])
def test_the_shipped_profiles_meet_what_was_published(machine: str, most: float) -> None:
    assert statistics.fmean(errors(machine)) <= most


def test_no_published_row_is_missed_by_more_than_repeats_differ_and_a_little() -> None:
    assert max(errors("a100") + errors("h100")) <= 0.04


def sweeps() -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in ROWS:
        if row.schedule == "dos-paper" and row.resident_ratio == "0":
            found.setdefault(f"{row.machine} {row.model}", []).append(row)
    return found


@pytest.mark.parametrize("sweep", sweeps().values(), ids=sweeps())
def test_the_stride_predicted_best_is_the_best_measured(sweep: list[Row]) -> None:
    chosen = min(sweep, key=lambda row: predict_row(NODES[row.machine], row))
    assert chosen.step_s <= 1.02 * min(row.step_s for row in sweep)


GOLDEN_S = {
    ("a100", "zero-offload", None): 2.696538,
    ("a100", "dos-paper", 3): 1.925732,
    ("h100", "zero-offload", None): 1.201479,
    ("h100", "dos-paper", 2): 0.652926,
}


@pytest.mark.parametrize("case", GOLDEN_S)
def test_golden_predictions(case: tuple[str, Schedule, int | None]) -> None:
    machine, schedule, stride = case
    _, seconds = simulate_published(
        NODES[machine], [100_000_000] * 20, schedule=schedule, stride=stride
    )
    assert seconds == pytest.approx(GOLDEN_S[case], rel=1e-4)
