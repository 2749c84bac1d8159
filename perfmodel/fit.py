"""Find the profile of a node from published step times, and how well it is pinned down."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dos.errors import ConfigError
from perfmodel.profile import NodeProfile
from perfmodel.published import Schedule
from perfmodel.published_runs import MACHINES, Row, predict_row, profile_from

NOISE = 0.012
"""Standard deviation of a measured step, as a share of it: repeats differ by up to 3%."""

ALIKE = 3.84
"""Fits whose chi-square exceeds the best by less are equally good: 95% for one parameter."""


@dataclass(frozen=True)
class Found:
    """A fit: figures by name, and chi-square (deviation over noise, and from what is usual)."""

    figures: dict[str, float]
    streams: int
    chi_square: float


@dataclass(frozen=True)
class Fit:
    """What the rows of one machine tell.

    Attributes:
        machine: which.
        profile: of the best fit.
        errors: per row, predicted over measured, less 1.
        alike: equally good fits, the best first.
        pinned: per figure, its least and largest value among them.
        left_out: per model and per stride, the mean absolute error on its rows of a fit without.
    """

    machine: str
    profile: NodeProfile
    errors: tuple[tuple[Row, float], ...]
    alike: tuple[Found, ...]
    pinned: dict[str, tuple[float, float]]
    left_out: dict[str, float]

    def report(self) -> dict[str, Any]:
        """All of it but the profile, for a JSON file."""
        schedules = sorted({row.schedule for row, _ in self.errors})
        return {
            "machine": self.machine,
            "mean_error": self.mean_error(),
            "mean_error_by_schedule": {each: self.mean_error(each) for each in schedules},
            "mean_error_where_left_out": self.left_out,
            "pinned_down": self.pinned,
            "rows": [
                {
                    "model": row.model,
                    "schedule": row.schedule,
                    "stride": row.stride,
                    "resident_ratio": float(row.resident_ratio),
                    "measured_s": row.step_s,
                    "error": error,
                }
                for row, error in self.errors
            ],
            "equally_good": [asdict(found) for found in self.alike],
        }

    def mean_error(self, *schedules: Schedule) -> float:
        """Mean absolute relative error, of the rows of these schedules; of all without any."""
        return _mean_error(
            [e for row, e in self.errors if not schedules or row.schedule in schedules]
        )


def _mean_error(errors: Sequence[float]) -> float:
    return statistics.fmean(map(abs, errors))


class Fitter:
    """Least squares over the rows of one machine, in logarithms, with `scipy`.

    Args:
        key: which of `MACHINES`.
        rows: measurements; those of other machines are passed over.
        streams: of the published code; of the machine's possible ones.

    Raises:
        ConfigError: no row is of that machine.
    """

    def __init__(self, key: str, rows: Sequence[Row], streams: int) -> None:
        self.rows = [row for row in rows if row.machine == key]
        if not self.rows:
            raise ConfigError(f"no row is of {key}", where="rows", fix="give rows of that machine")
        self.machine, self.streams = MACHINES[key], streams

    def predict(self, figures: Mapping[str, float], rows: Sequence[Row]) -> list[float]:
        """Seconds per row; repeats are simulated once."""
        profile = profile_from(self.machine, figures, self.streams, source="a fit under way")
        known: dict[tuple[object, ...], float] = {}
        for row in rows:
            if row.case not in known:
                known[row.case] = predict_row(profile, row)
        return [known[row.case] for row in rows]

    def errors(self, figures: Mapping[str, float], rows: Sequence[Row]) -> list[float]:
        """Per row, predicted over measured, less 1."""
        pairs = zip(self.predict(figures, rows), rows, strict=True)
        return [predicted_s / row.step_s - 1 for predicted_s, row in pairs]

    def descend(
        self, start: Mapping[str, float], rows: Sequence[Row], fixed: Mapping[str, float]
    ) -> Found:
        """The optimum next to `start`; figures in `fixed` stay as they are."""
        import numpy as np

        optimize = _scipy_optimize()
        parameters = self.machine.parameters
        names = [name for name in parameters if name not in fixed]

        def residuals(x: Any) -> Any:
            figures = {**fixed, **dict(zip(names, map(math.exp, x), strict=True))}
            off = [math.log1p(error) / NOISE for error in self.errors(figures, rows)]
            pull = [math.log(figures[n] / p.usual) / p.spread for n, p in parameters.items()]
            return np.array(off + pull)

        low = np.log([parameters[name].low for name in names])
        high = np.log([parameters[name].high for name in names])
        # Inside the bounds by a hair, as the solver demands.
        x = np.clip(np.log([start[name] for name in names]), low + 1e-6, high - 1e-6)
        # The model has kinks, where another lane becomes the slowest: steps well above rounding.
        done = optimize.least_squares(
            residuals,
            x,
            bounds=(low, high),
            diff_step=1e-3,
            x_scale=0.3,
            ftol=1e-4,
            xtol=1e-4,
            max_nfev=30,
        )
        figures = {**fixed, **dict(zip(names, map(math.exp, done.x), strict=True))}
        return Found(figures, self.streams, 2 * float(done.cost))

    def starts(self, count: int, seed: int) -> list[dict[str, float]]:
        """Figures drawn within the bounds, evenly in logarithms."""
        draw = random.Random(seed)
        return [
            {
                name: math.exp(draw.uniform(math.log(p.low), math.log(p.high)))
                for name, p in self.machine.parameters.items()
            }
            for _ in range(count)
        ]

    def best(self, rows: Sequence[Row], starts: int, seed: int = 0) -> list[Found]:
        """Optima from several starts, the best first."""
        found = [self.descend(start, rows, {}) for start in self.starts(starts, seed)]
        return sorted(found, key=_chi_square)

    def along(self, best: Found, name: str, points: int) -> list[Found]:
        """The profile likelihood of one figure: all others fitted anew at values of it.

        Outwards from the best, in steps that grow, until a fit is worse by more than `ALIKE`.
        """
        parameter = self.machine.parameters[name]
        found = []
        for bound in (parameter.low, parameter.high):
            start = best.figures
            for step in range(1, points + 1):
                value = _between(best.figures[name], bound, (step / points) ** 2)
                one = self.descend(start, self.rows, {name: value})
                if one.chi_square > best.chi_square + ALIKE:
                    break
                found.append(one)
                start = one.figures
        return found


def _between(at: float, bound: float, share: float) -> float:
    """The value that share of the way from one to another, in logarithms."""
    return float(at * (bound / at) ** share)


def fit(
    key: str,
    rows: Sequence[Row],
    *,
    starts: int = 8,
    points: int = 6,
    progress: Callable[[str, float], None] = lambda stage, share: None,
) -> Fit:
    """Fit one machine: multi-start, likelihood profiles, and each model and stride left out once.

    Deterministic. `starts` optima are sought within the physical bounds; each figure is then
    followed up and down in `points` steps for as long as fits stay equally good. `progress` is
    told the stage and the share that is done.

    Raises:
        ConfigError: an unknown machine, no row of it, or no scipy.
    """
    if key not in MACHINES:
        raise ConfigError(
            f"{key!r} is unknown", where="machine", fix=f"give one of {', '.join(MACHINES)}"
        )
    machine = MACHINES[key]
    fitters = {streams: Fitter(key, rows, streams) for streams in machine.streams}
    alike = _search(fitters, starts, points, progress)
    fitter, best = fitters[alike[0].streams], alike[0]
    figures = {name: float(f"{value:.5g}") for name, value in best.figures.items()}
    errors = fitter.errors(figures, fitter.rows)
    progress("rows left out", 0.7)
    source = (
        f"fitted to {len(errors)} step times that were published with Deep Optimizer States "
        f"(Middleware'24), mean error {_mean_error(errors):.1%}; this library's device update and "
        "cost per op assumed, its host update from the bytes that theirs moves"
    )
    return Fit(
        machine=key,
        profile=profile_from(machine, figures, best.streams, source=source),
        errors=tuple(zip(fitter.rows, errors, strict=True)),
        alike=tuple(alike),
        pinned={
            name: (min(f.figures[name] for f in alike), max(f.figures[name] for f in alike))
            for name in machine.parameters
        },
        left_out=_left_out(fitter, best, starts),
    )


def _search(
    fitters: Mapping[int, Fitter],
    starts: int,
    points: int,
    progress: Callable[[str, float], None],
) -> list[Found]:
    """Equally good fits, the best first: optima, and along each figure from them."""
    found = []
    for nth, fitter in enumerate(fitters.values()):
        progress("starts", 0.3 * nth / len(fitters))
        found += fitter.best(fitter.rows, starts)
    least = min(map(_chi_square, found))
    for streams, fitter in fitters.items():
        best = min((each for each in found if each.streams == streams), key=_chi_square)
        if best.chi_square <= least + ALIKE:
            for nth, name in enumerate(fitter.machine.parameters):
                progress(name, 0.3 + 0.4 * nth / len(fitter.machine.parameters))
                found += fitter.along(best, name, points)
    found.sort(key=_chi_square)
    return [each for each in found if each.chi_square <= found[0].chi_square + ALIKE]


def _chi_square(found: Found) -> float:
    return found.chi_square


def _left_out(fitter: Fitter, best: Found, starts: int) -> dict[str, float]:
    """Per model and per stride, the mean error on its rows of a fit to the others.

    A fit without a model, half of the rows, starts anew; one without a stride at the best fit.
    """
    errors = {}
    rows = fitter.rows
    for model in sorted({row.model for row in rows}):
        own = [row for row in rows if row.model == model]
        others = [row for row in rows if row.model != model]
        if others:
            without = fitter.best(others, starts)[0]
            errors[model] = _mean_error(fitter.errors(without.figures, own))
    for stride in sorted({row.stride for row in rows if row.stride is not None}):
        own = [row for row in rows if row.stride == stride]
        others = [row for row in rows if row.stride != stride]
        if others:
            without = fitter.descend(best.figures, others, {})
            errors[f"stride {stride}"] = _mean_error(fitter.errors(without.figures, own))
    return errors


def _scipy_optimize() -> Any:
    try:
        from scipy import optimize
    except ImportError:
        raise ConfigError(
            "scipy is not installed", where="fit", fix="pip install 'deep-optimizer-states[fit]'"
        ) from None
    return optimize
