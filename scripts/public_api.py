"""Writes down what users may rely on, into tests/cpu/public_api.txt: names, signatures, commands.

    python -m scripts.public_api

A test compares the file with the code, so that a change of it is one that somebody meant.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic_core
import typer

RECORD = Path(__file__).parents[1] / "tests" / "cpu" / "public_api.txt"
OURS = ("dos", "perfmodel")

# By module: its __all__ where None, else these names.
SURFACE: dict[str, tuple[str, ...] | None] = {
    "dos": None,
    "dos.checkpoint": None,
    "dos.checkpoint.directory": ("Saved",),  # of Checkpointer.list()
    "dos.checkpoint.restoring": ("Restored",),  # of Checkpointer.restore()
    "dos.execute.record": ("StepRecord",),  # optimizer.last_step
    "dos.integrations.deepspeed_zero3": ("attach", "register"),
    "dos.memory": ("HeldState",),  # of optimizer.hold_state()
    "perfmodel.profile": ("NodeProfile", "PublishedCode"),
}
COMMANDS = {"dos": "dos.cli", "python -m perfmodel": "perfmodel.__main__"}


class Bare(str):
    """An annotation as it stands in the source, which inspect shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def surface() -> Iterator[str]:
    """The lines of the record.

    Raises:
        ImportError: an optional library, on which a public module builds, is missing.
    """
    for module, names in SURFACE.items():
        home = importlib.import_module(module)
        yield f"[{module}]"
        for name in sorted(names or home.__all__):
            yield from described(name, getattr(home, name))
        yield ""
    for program, module in COMMANDS.items():
        yield f"[{program}]"
        yield from commands("", importlib.import_module(module).app)
        yield ""


def described(name: str, value: Any) -> Iterator[str]:
    """A function, or a class with its fields and members, as far as they are this library's."""
    if not inspect.isclass(value):
        yield f"{name}{signature(value)}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"class {name}({bases})"
    fields: dict[str, str] = {}
    members: dict[str, str] = {}
    for kind in reversed(value.__mro__):
        if kind.__module__.split(".")[0] in OURS:
            fields |= dict.fromkeys(documented_attributes(kind), "")
            fields |= {key: f": {told}" for key, told in annotated_fields(kind).items()}
            members |= {key: member(key, kind.__dict__[key]) for key in methods(kind)}
    # In their order, since that is the order of positional arguments.
    yield from (f"    {key}{told}" for key, told in fields.items() if key not in members)
    yield from (f"    {members[key]}" for key in sorted(members))


def documented_attributes(kind: type) -> list[str]:
    """The names under `Attributes:` in a class's docstring."""
    _, _, section = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    return re.findall(r"^ {4}(\w+): ", section, flags=re.MULTILINE)


def annotated_fields(kind: type) -> dict[str, str]:
    """Type and default by field, of data classes, named tuples and pydantic's models."""
    # By text: `inspect.get_annotations` leaves it as it stands.
    found = {key: bare(kind) for key, kind in inspect.get_annotations(kind).items() if public(key)}
    return {key: f"{told}{default_of(kind, key)}" for key, told in found.items()}


def methods(kind: type) -> list[str]:
    """Names of a class's own functions and properties; not a constructor that fields make."""
    kinds = (property, classmethod, staticmethod)
    made = dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields")
    return [
        name
        for name, value in kind.__dict__.items()
        if (public(name) or (name == "__init__" and not made))
        and (inspect.isfunction(value) or isinstance(value, kinds))
    ]


def member(name: str, value: Any) -> str:
    """One line for a method or a property."""
    if isinstance(value, property):
        returned = inspect.signature(value.fget).return_annotation if value.fget else ""
        return f"{name} -> {returned}"
    return f"{name}{signature(getattr(value, '__func__', value))}"


def default_of(kind: type, field: str) -> str:
    """` = value` of a field that has one."""
    missing = (dataclasses.MISSING, pydantic_core.PydanticUndefined)
    for table in ("model_fields", "__dataclass_fields__"):
        if field in (fields := getattr(kind, table, {})):
            value = fields[field].default
            return "" if value in missing else f" = {value!r}"
    return ""


def signature(function: Any) -> str:
    """As in the source, without `self`."""
    found = inspect.signature(function)
    parameters = [
        one.replace(annotation=bare(one.annotation), default=named(one.default))
        for one in found.parameters.values()
        if one.name not in ("self", "cls")
    ]
    returned = bare(found.return_annotation)
    return str(found.replace(parameters=parameters, return_annotation=returned))


def bare(annotation: Any) -> Any:
    """Most annotations are text, by `from __future__ import annotations`."""
    text = getattr(annotation, "__forward_arg__", annotation)
    return Bare(text) if isinstance(text, str) else annotation


def named(default: Any) -> Any:
    """A function that is a default by its name; others have addresses."""
    return Bare(default.__name__) if inspect.isfunction(default) else default


def public(name: str) -> bool:
    """Whether users may rely on a name; pydantic's configuration is none of them."""
    return not name.startswith("_") and name != "model_config"


def commands(prefix: str, app: typer.Typer) -> Iterator[str]:
    """A program's commands, each with its arguments and options."""
    for command in sorted(app.registered_commands, key=lambda one: command_name(one)):
        yield f"{prefix}{command_name(command)}"
        assert command.callback is not None
        for one in inspect.signature(command.callback, eval_str=True).parameters.values():
            yield f"    {parameter(one)}"
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands(f"{prefix}{group.name} ", group.typer_instance)


def command_name(command: Any) -> str:
    """As it is typed."""
    return command.name or command.callback.__name__.replace("_", "-")


def parameter(one: inspect.Parameter) -> str:
    """An argument's name, or an option's names; its type; its default."""
    kind, info = typing.get_args(one.annotation)
    name = one.name.replace("_", "-")
    if isinstance(info, typer.models.ArgumentInfo):
        name = name.upper()
    else:
        # In `Annotated` the first name takes the place of the default.
        given = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
        name = " ".join(given) or f"--{name}"
    default = "" if one.default is inspect.Parameter.empty else f" = {one.default!r}"
    return f"{name}: {inspect.formatannotation(kind)}{default}"


def main() -> None:
    """Renew the record."""
    RECORD.write_text("\n".join(surface()))


if __name__ == "__main__":
    main()
