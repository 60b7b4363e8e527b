"""The command line as text: every command with its arguments and options, as its help lists them.

Help texts may change, so only whether there is one is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from services.cli import main as command_line

MODULE_PATH = re.compile(r"\b(?:[a-z_]\w*\.)+(?=\w)")


def describe_commands() -> list[str]:
    """All commands in the order of the help, each with its parameters in theirs."""
    return list(_describe_command("diptych", typer.main.get_command(command_line.app), None))


def _describe_command(path: str, command: Any, parent: Any) -> Iterator[str]:
    context = command.make_context(path.rpartition(" ")[2], [], parent=parent, resilient_parsing=True)
    traits = [
        name
        for name in ("help", "epilog", "hidden", "deprecated", "no_args_is_help")
        if getattr(command, name, None)
    ]
    panel = [f"panel {command.rich_help_panel!r}"] if isinstance(command.rich_help_panel, str) else []
    yield f"{path}: {', '.join([*traits, *panel])}"
    for one in command.get_params(context):
        yield f"  {_describe_parameter(one)}"
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            _, found, _ = command.resolve_command(context, [name])
            yield from _describe_command(f"{path} {name}", found, context)


def _describe_parameter(one: Any) -> str:
    is_argument = one.param_type_name == "argument"
    names = [one.metavar or one.name] if is_argument else [*one.opts]
    names += [f"/{name}" for name in one.secondary_opts]
    parts = [" ".join(names), _type_text(one)]
    bounds = {"min": getattr(one, "min", None), "max": getattr(one, "max", None)}
    parts += [f"{name} {value}" for name, value in bounds.items() if value is not None]
    parts += [f"metavar {one.metavar}"] if one.metavar and not is_argument else []
    parts += [f"default {_default_text(one)}"] if one.default is not None else []
    parts += [f"env {one.envvar}"] if one.envvar else []
    traits = ("required", "multiple", "hidden", "is_eager", "help")
    parts += [name for name in traits if getattr(one, name, None)]
    parts += [f"panel {one.rich_help_panel!r}"] if isinstance(one.rich_help_panel, str) else []
    return "; ".join(parts)


def _type_text(one: Any) -> str:
    """The type of a parameter's value, without modules."""
    annotation = one.type_descriptor.annotation
    text = annotation.__name__ if type(annotation) is type else str(annotation)
    return MODULE_PATH.sub("", text)


def _default_text(one: Any) -> str:
    if callable(one.default):
        return "made when it is needed"
    shown = one.show_default if isinstance(one.show_default, str) else ""
    value = one.default.as_posix() if isinstance(one.default, Path) else one.default
    return f"{value!r}{f' shown as {shown!r}' if shown else '' if one.show_default else ' not shown'}"
