"""How often to save: what a checkpoint costs against what a failure costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dos.errors import ConfigError

SAVED_BYTES_PER_PARAM = 12
"""fp32 master, momentum and variance; a 16-bit weight is the master's rounding."""


@dataclass(frozen=True, slots=True)
class Interval:
    """How often to save, in seconds of training between two saves.

    Attributes:
        young_s, daly_s: by the formulas of those names.
        interval_s: what to use: Daly's, but no shorter than one save takes to write.
        write_s: how long one save writes, beside training; 0 where that is not known.
        waste: share of the time that saving, repeated work and restarts take at `interval_s`.
    """

    young_s: float
    daly_s: float
    interval_s: float
    write_s: float
    waste: float


def checkpoint_interval(
    mtbf_s: float, stall_s: float, *, write_s: float = 0.0, restart_s: float = 0.0
) -> Interval:
    """The interval that wastes least time, given the mean time between failures of the whole job.

    Young (Communications of the ACM 17(9), 1974): sqrt(2 d M), d being what a save costs the
    training and M the mean time between failures. Daly (Future Generation Computer Systems 22,
    2006, eq. 37): sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d < 2M, else M. The
    waste is that of `wasted`.

    Args:
        mtbf_s: M, in seconds.
        stall_s: d, the seconds for which a save stops training.
        write_s: seconds that it then writes beside it.
        restart_s: from a failure until training goes on.

    Raises:
        ConfigError: a time that cannot be.
    """
    times = {"mtbf": mtbf_s, "stall": stall_s, "write": write_s, "restart": restart_s}
    for name, value in times.items():
        if not (0 <= value < math.inf) or (name in ("mtbf", "stall") and value == 0):
            raise ConfigError(
                f"{value!r} s cannot be", where=name, fix="give a finite positive number"
            )
    young_s = math.sqrt(2 * stall_s * mtbf_s)
    ratio = stall_s / (2 * mtbf_s)
    daly_s = young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s if ratio < 1 else mtbf_s
    interval_s = max(daly_s, write_s)
    waste = wasted(interval_s, mtbf_s, stall_s, write_s=write_s, restart_s=restart_s)
    return Interval(young_s, daly_s, interval_s, write_s, waste)


def wasted(
    interval_s: float,
    mtbf_s: float,
    stall_s: float,
    *,
    write_s: float = 0.0,
    restart_s: float = 0.0,
) -> float:
    """Share of the time lost when so much training lies between two saves; of first order.

    d / (T + d), and per failure half an interval, the save under way (it cannot be used until it
    is written) and the restart. Times as in `checkpoint_interval`; at most 1.
    """
    saving = stall_s / (interval_s + stall_s)
    failing = ((interval_s + stall_s) / 2 + write_s + restart_s) / mtbf_s
    return min(saving + failing, 1.0)
