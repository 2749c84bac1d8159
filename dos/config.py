"""Every knob of the optimizer, checked when it is made."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dos.errors import ConfigError


@runtime_checkable
class Pace(Protocol):
    """What gives each op its duration on an emulated node; a `perfmodel.NodeProfile` is one."""

    def op_s(self, lane: str, *, numel: int, link_bytes: int) -> float:
        """Seconds that an op on ``lane`` takes for ``numel`` parameters and ``link_bytes``."""
        ...


class _Options(BaseModel):
    """A frozen model whose errors are ours: option, what is wrong, how to fix it."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise _explain(type(self), error) from None


class VirtualDevice(_Options):
    """An accelerator made of threads, for machines without one.

    Pass one as ``device=`` to exercise the interleaving. Everything measured on it is an
    emulation and is labelled "virtual".
    """

    pace: Pace | None = Field(
        default=None, description="rates to emulate, a perfmodel.NodeProfile; None runs flat out"
    )
    time_scale: float = Field(
        default=1.0,
        ge=1.0,
        allow_inf_nan=False,
        description="every paced op is stretched by this, so that the real work fits inside its "
        "slot; reported times are divided by it",
    )
    jitter_seed: int | None = Field(
        default=None, description="random delays before each op, by this seed; None for none"
    )
    poison: bool = Field(default=False, description="fill a staging slot with NaN on release")

    @property
    def label(self) -> str:
        """What it is called in reports and traces."""
        name = getattr(self.pace, "name", "a node")
        return "virtual device" if self.pace is None else f"virtual device paced like {name}"


class DOSConfig(_Options):
    """Options of `dos.DOSOptimizer`. An unknown key is an error naming the nearest valid one."""

    stride: int | float | Literal["auto", "host"] = Field(
        default="auto",
        description="k >= 1 updates one subgroup in every k on the device (1.5: two of three, "
        '1: all); "host" none; "auto" lets the performance model choose',
    )
    subgroup_size: int = Field(
        default=100_000_000,
        ge=1,
        strict=True,
        description="parameters per subgroup, from 1,024 on rounded down to a multiple of that",
    )
    device: Any = Field(
        default="auto",
        description='"auto", "cpu", "virtual", a dos.VirtualDevice, or any torch device',
    )
    resident_ratio: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="share of the subgroups whose state stays on the device for good",
    )
    device_slots: int = Field(
        default=2, ge=1, strict=True, description="device staging slots for streamed subgroups"
    )
    host_memory_bytes: int | None = Field(
        default=None, ge=1, strict=True, description="host memory budget; None for what is free"
    )
    ring_bytes: int | None = Field(
        default=None, ge=1, strict=True, description="staging memory; None for what the plan needs"
    )
    threads: int | None = Field(
        default=None, ge=1, strict=True, description="CPU threads; None for all this process has"
    )
    pin_threads: bool = Field(
        default=False,
        strict=True,
        description="bind each CPU thread to a core of its own; a caller of step() only meanwhile",
    )
    wire: Literal["auto", "native", "fp32"] = Field(
        default="auto",
        description='how gradients travel to the host: "native" in their own 16 bits, "fp32" '
        'widened on the device; the same bits of training. "auto" is native',
    )
    release_grads: bool = Field(
        default=False,
        strict=True,
        description="free p.grad as soon as it is sent; torch's own clipping is then refused",
    )
    overlap_forward: bool = Field(
        default=False,
        strict=True,
        description="step() returns early; each module's forward waits for its own weights",
    )

    profile: str | Path | Pace | None = Field(
        default=None,
        description='rates that stride="auto" goes by: a perfmodel.NodeProfile or the path of one; '
        "None: this machine's cache, else measured at the first step",
    )

    @field_validator("stride", mode="before")
    @classmethod
    def _stride(cls, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError('a number >= 1, "auto" or "host"')
        if isinstance(value, str):
            if value not in ("auto", "host"):
                raise ValueError('a number >= 1, "auto" or "host"')
        elif not (math.isfinite(value) and value >= 1):
            raise ValueError('a number >= 1, "auto" or "host"')
        elif value == int(value):
            return int(value)  # 2.0 is 2: the stride is kept and compared as decimal text
        return value

    @field_validator("device")
    @classmethod
    def _device(cls, value: object) -> object:
        if isinstance(value, (str, VirtualDevice)) or type(value).__name__ == "device":
            return value
        raise ValueError('"auto", "cpu", "virtual", a dos.VirtualDevice or a torch device')


class DeepSpeedCheckpoint(_Options):
    """How an engine of DeepSpeed saves and loads: the section "checkpoint" of its configuration."""

    ring_bytes: int | None = Field(
        default=None,
        ge=4 << 20,
        description="host memory through which goes what is not written where it lies; None: "
        "2 GiB or a tenth of the memory that is available, whichever is less",
    )
    commit_timeout_s: float = Field(
        default=600.0, gt=0, description="how long a rank waits for the others before a save fails"
    )
    close_timeout_s: float = Field(
        default=600.0, gt=0, description="how long the last save is waited for at the end"
    )
    trusted: bool = Field(
        default=False,
        description="unpickle objects of other classes than the known ones when loading: "
        "that can run any code, so only for checkpoints of people you trust",
    )


def _explain(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """The first problem of a pydantic error, said in this library's way."""
    problem = error.errors()[0]
    key = str(problem["loc"][0]) if problem["loc"] else model.__name__
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, model.model_fields, n=1)
        valid = ", ".join(model.model_fields)
        return ConfigError(
            f"unknown option {key!r}",
            where=model.__name__,
            fix=f"did you mean {near[0]!r}?" if near else f"valid options are {valid}",
        )
    description = model.model_fields[key].description if key in model.model_fields else None
    message = str(problem["msg"]).removeprefix("Value error, ")
    return ConfigError(
        f"{problem['input']!r} is not valid: {message}",
        where=f"{model.__name__}.{key}",
        fix=f"{key}: {description}" if description else "see help(dos.DOSConfig)",
    )
