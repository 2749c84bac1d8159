"""This library's own plans, made for `perfmodel.solve`, which knows none."""

from __future__ import annotations

from collections.abc import Sequence

from dos.errors import ConfigError
from dos.plan import SubgroupSize, UpdatePlan, build, partition
from perfmodel.solve import Option, Planned, Planner

WEIGHT_BYTES = 2
"""Of a published weight, per parameter."""

MOST_SUBGROUPS = 10_000
"""Of a model that is predicted: a thousand times what is usual, and still simulated in seconds."""


def plan_of(
    numels: Sequence[int],
    option: Option,
    *,
    gradients_sent: bool = True,
    host_parameters: bool = False,
) -> UpdatePlan:
    """The plan of one step over subgroups of these sizes.

    Args:
        numels: parameters per subgroup; the option's size does not count.
        option: all else.
        gradients_sent: all gradients came during backward; else the step sends them.
        host_parameters: there is no device, and nothing to send.
    """
    wire_bytes = 0 if gradients_sent else option.wire_bytes
    return build(
        [SubgroupSize(numel, wire_bytes * numel, WEIGHT_BYTES * numel) for numel in numels],
        stride=option.stride,
        resident_ratio=option.resident_ratio,
        slots=option.slots,
        host_parameters=host_parameters,
    )


def cut(params: int, subgroup_size: int) -> list[int]:
    """Parameters per subgroup, as this library cuts them.

    Raises:
        ConfigError: more than `MOST_SUBGROUPS`.
    """
    if params > MOST_SUBGROUPS * subgroup_size:
        raise ConfigError(
            f"{params:,} parameters of one rank in subgroups of {subgroup_size:,} are more than "
            f"{MOST_SUBGROUPS:,} subgroups",
            where="--subgroup-size",
            fix="make subgroups larger, or spread the model over more ranks",
        )
    return [subgroup.numel for subgroup in partition([params], [0], subgroup_size)]


def planner_for(
    params: int, *, gradients_sent: bool = True, host_parameters: bool = False
) -> Planner:
    """Plans for that many parameters; their memory counts the gradients in any case."""

    def planner(option: Option) -> Planned:
        numels = cut(params, option.subgroup_size)
        step, whole = (
            plan_of(numels, option, gradients_sent=sent, host_parameters=host_parameters)
            for sent in (gradients_sent, False)
        )
        return Planned(step, whole.memory())

    return planner
