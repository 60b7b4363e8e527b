"""Commands whose options are the fields of a frozen dataclass, such as `BenchOptions` or `PlanOptions`.

`diptych.config.fields.option_field` makes such fields. Their order is that of `--help`. Other fields are no options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from diptych.config.fields import flag_name
from diptych.errors import ConfigError

# A field of this name holds the names of the fields whose flags were given.
GIVEN = "given"
T = TypeVar("T")


def options_command(options_type: type[T]) -> Callable[[Callable[[T], int]], Callable[..., None]]:
    """Makes a typer command from a function that takes `options_type` and returns the exit status.

    The command has one option for each field that `option_field` made. A field of type `tuple[X, ...]` is an
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
    options = [_option_parameter(one, types[one.name]) for one in fields(options_type) if one.metadata]
    return [context, *options]


def _option_parameter(one: Field[Any], value_type: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if one.default is MISSING else one.default
    if get_origin(value_type) is tuple:
        value_type = list[get_args(value_type)[0]]  # type: ignore[misc]
    flag, more = _option_flag(one), {"show_default": default not in (None, ""), **one.metadata}
    more.pop("flag", None)
    info = typer.Option(flag, **more) if flag else typer.Argument(**more)
    annotation: Any = Annotated[value_type, info]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option_flag(one: Field[Any]) -> str:
    flag: str = one.metadata.get("flag", flag_name(one.name))
    return f"{flag}/--no-{flag[2:]}" if one.default is True else flag


def refuse_flags(options: Any, names: Collection[str], where: str, why: str, fix: str) -> None:
    """Refuse flags that have no effect `where`, by the names of their fields. Raises ConfigError if there are any."""
    if names:
        flags = ", ".join(_option_flag(one) for one in fields(options) if one.name in names)
        raise ConfigError(f"{flags} has no effect{where}", why, fix)
