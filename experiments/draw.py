"""Draws every picture from its numbers: `python -m experiments.draw`, or `make figures`.

Nothing is measured or computed anew: a picture is of the files in experiments/results (and the
published rows beside them), and the same files give the same bytes. A picture whose numbers are not
there is left out, and that is said.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from experiments import draw_checkpoints, draw_updates
from experiments.evidence import RESULTS
from perfmodel.report import new_figure

PICTURES = Path(__file__).parent / "pictures"
STYLE = {
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


class Picture(NamedTuple):
    """One picture.

    Attributes:
        needs: files of numbers without which there is none.
        uses: further ones, which it shows where they are there.
        inches: width and height.
        draw: puts numbers by file name onto a figure.
    """

    needs: tuple[str, ...]
    uses: tuple[str, ...]
    inches: tuple[float, float]
    draw: Callable[[Any, dict[str, Any]], None]


ALL = {
    "strides": Picture(
        ("predictions",), ("bench_sweep", "bench_gpu_update"), (11, 7), draw_updates.strides
    ),
    "residents": Picture(("predictions",), ("bench_sweep",), (9, 3.8), draw_updates.residents),
    "phases": Picture(("paper_runs",), ("bench_phases",), (11, 3.8), draw_updates.phases),
    "io": Picture(("bench_io",), (), (11, 8), draw_checkpoints.io),
    "ablation": Picture(("bench_ablation",), (), (8, 3.6), draw_checkpoints.ablation),
    "ranks": Picture(("bench_ranks",), (), (6, 3.8), draw_checkpoints.ranks),
    "interval": Picture(("bench_capture",), (), (7, 4), draw_checkpoints.interval),
}


def numbers_of(name: str, results: Path) -> Any:
    """What a file holds; None where there is none."""
    published = Path(__file__).parent / "data" / f"{name}.json"
    path = published if published.exists() else results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def drawn(picture: Picture, results: Path) -> Any:
    """The figure of a picture, or None where its numbers are not there."""
    numbers = {name: numbers_of(name, results) for name in (*picture.needs, *picture.uses)}
    if any(numbers[name] is None for name in picture.needs):
        return None
    figure = new_figure(*picture.inches)
    import matplotlib  # it is there, since there is a figure

    with matplotlib.rc_context(STYLE):
        picture.draw(figure, numbers)
    return figure


def png(figure: Any) -> bytes:
    """The picture of a figure, without the name of the program, whose version changes."""
    made = io.BytesIO()
    figure.savefig(made, dpi=80, metadata={"Software": None})
    return made.getvalue()


def main(
    results: Annotated[Path, typer.Option(help="folder of the numbers")] = RESULTS,
    pictures: Annotated[Path, typer.Option(help="folder of the pictures")] = PICTURES,
) -> None:
    """Draw every picture whose numbers are there."""
    pictures.mkdir(exist_ok=True)
    for name, picture in ALL.items():
        figure = drawn(picture, results)
        if figure is None:
            print(f"{name}: left out, there is no {' or '.join(picture.needs)}", file=sys.stderr)
            continue
        (pictures / f"{name}.png").write_bytes(png(figure))


if __name__ == "__main__":
    typer.run(main)
