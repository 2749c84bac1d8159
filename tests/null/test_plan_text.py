"""The text form: what it looks like and what it refuses."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from dos.errors import PlanError
from dos.plan import SubgroupSize, build, parse_plan, text

SIZE = SubgroupSize(numel=8, grad_bytes=16, weight_bytes=16)
PLAN = build([SIZE] * 3, stride=2, absent={2})
LINES = str(PLAN).splitlines()


def test_the_example_in_the_documentation_is_what_is_printed() -> None:
    example = inspect.cleandoc(text.__doc__ or "").split("\n\n")[1]
    printed = str(build([SIZE] * 2, stride=2))
    lines = [line.strip() for line in example.splitlines()]
    assert [line.split() for line in lines] == [
        line.split() for line in printed.splitlines()[: len(lines)]
    ]


def test_columns_line_up() -> None:
    arrows = {line.index("->") for line in LINES if line.startswith("op")}
    assert len(arrows) == 1


def test_an_absent_subgroup_says_so() -> None:
    assert LINES[3].endswith("absent")


def test_blank_lines_and_indentation_do_not_matter() -> None:
    assert parse_plan("\n" + "\n\n".join(f"    {line} " for line in LINES)) == PLAN


def test_an_empty_plan_reads_back() -> None:
    empty = build([], stride="host")
    assert parse_plan(str(empty)) == empty


def test_an_op_without_buffers_reads_back() -> None:
    bare = replace(PLAN, ops=(replace(PLAN.ops[0], reads=(), writes=()),))
    assert parse_plan(str(bare)) == bare


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        (1, "plan", "plans"),
        (1, "slots=2", "slots=two"),
        (1, "parameters=device", "parameters=disk"),
        (3, "subgroup 1", "subgroup 2"),
        (3, "streamed", "steamed"),
        (3, "numel=8", "numel="),
        (5, "fetch", "fetches"),
        (5, "h2d", "d2h"),
        (5, "@0", "@x"),
        (5, "slot[0]", "slot(0)"),
        (6, "->", "<-"),
        (7, "after 0", "after 0,"),
        (7, "op", "subgroup"),
    ],
)
def test_a_broken_line_is_named(line: int, old: str, new: str) -> None:
    assert old in LINES[line - 1]
    lines = [*LINES[: line - 1], LINES[line - 1].replace(old, new), *LINES[line:]]
    with pytest.raises(PlanError) as caught:
        parse_plan("\n".join(lines))
    assert caught.value.where == f"line {line}"


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(PlanError, match="empty"):
        parse_plan(" \n")
