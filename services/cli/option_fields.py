"""Commands whose options are the fields of a frozen dataclass: `BenchOptions`, `PlanOptions`, `SimulateOptions`.

A field that is an option has its flag in its metadata, under "flag". All other metadata go to `typer.Option`. The order
of the fields is the order of `--help`. A field without metadata is no option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

# A field of this name holds the names of the fields whose flags were given.
GIVEN = "given"
T = TypeVar("T")


def option_field(default: Any, flag: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """A field with a default that is also an option, listed in `panel` by `--help`. `more` goes to `typer.Option`."""
    return field(default=default, metadata={"flag": flag, "help": help, "rich_help_panel": panel, **more})


def options_command(options_type: type[T]) -> Callable[[Callable[[T], int]], Callable[..., None]]:
    """Makes a typer command from a function that takes `options_type` and returns the exit status.

    The command has one option for each field of `options_type` with a flag. A field of type `tuple[X, ...]` is an
    option that may be given more than once.
    """

    def make_command(run: Callable[[T], int]) -> Callable[..., None]:
        def command(ctx: typer.Context, **values: Any) -> None:
            raise typer.Exit(run(_read_options(options_type, ctx, values)))

        parameters = _command_parameters(options_type)
        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return make_command


def _read_options(options_type: type[T], ctx: typer.Context, values: dict[str, Any]) -> T:
    every: Any = fields(options_type)  # type: ignore[arg-type]
    if any(one.name == GIVEN for one in every):
        values[GIVEN] = frozenset(
            name
            for name in ctx.params
            if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
        )
    lists = {name for name, value in values.items() if isinstance(value, list)}
    return options_type(**values | {name: tuple(values[name]) for name in lists})


def _command_parameters(options_type: type[Any]) -> list[inspect.Parameter]:
    types = get_type_hints(options_type)
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    options = [
        _option_parameter(one, types[one.name]) for one in fields(options_type) if "flag" in one.metadata
    ]
    return [context, *options]


def _option_parameter(one: Field[Any], value_type: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if one.default is MISSING else one.default
    if get_origin(value_type) is tuple:
        value_type = list[get_args(value_type)[0]]  # type: ignore[misc]
    more = dict(one.metadata)
    info = typer.Option(more.pop("flag"), **{"show_default": default not in (None, ""), **more})
    annotation: Any = Annotated[value_type, info]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
