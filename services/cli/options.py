"""The command line's options, made from the settings of `diptych.config.Config`.

Typer collects texts only; `diptych.load` reads them, so that flags, environment and YAML are checked by the same code.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from diptych.config import Config
from diptych.errors import ConfigError
from diptych.load import Loaded, load
from diptych.settings import Setting, settings
from services.cli.reference import table


class Command(TyperCommand):
    """Its help names a switch once: a column of every `--no-` leaves no room for names in 80 columns."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for one in self.params:  # of a process that shows help, and ends
            one.secondary_opts = []
        super().format_help(ctx, formatter)


def bind(command: str, run: Callable[[Loaded], int], place: str = "model") -> Callable[..., None]:
    """A function for `typer.Typer.command` whose parameters are the settings of `command`.

    `place` is the setting that may also be given by position.
    """
    parameters = [_placed(place), _config(), *map(_option, settings(Config, command)), _all(command)]

    def invoke(**given: Any) -> None:
        file: Path | None = given.pop("config", None)
        given.pop("help_all", None)
        named, placed = given.get(place), given.pop("placed", None)
        if named and placed and named != placed:
            raise ConfigError(
                f"the {place} is given twice", f"{placed!r} and --{place} {named!r}", "leave out one"
            )
        given[place] = placed or named
        raise typer.Exit(run(load(command, given, os.environ, file)))

    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    invoke.__annotations__ = {one.name: one.annotation for one in parameters}
    return invoke


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _placed(name: str) -> inspect.Parameter:
    told = next(one.help for one in settings(Config) if one.name == name)
    info = typer.Argument(metavar=name.upper(), help=told, show_default=False)
    return _parameter("placed", Annotated[str | None, info])


def _config() -> inspect.Parameter:
    info = typer.Option("--config", metavar="FILE", help="Settings from a YAML file", show_default=False)
    return _parameter("config", Annotated[Path | None, info])


def _option(setting: Setting) -> inspect.Parameter:
    shown = f" ({setting.shown})" if setting.shown and not setting.kind.switch else ""
    flag = setting.flag
    kind: Any = list[str] if setting.kind.many else str
    if setting.kind.switch:
        flag, kind = f"{flag}/--no-{flag[2:]}", bool
        shown = f" (on; --no-{setting.flag[2:]})" if setting.default else " (off)"
    info = typer.Option(
        flag,
        metavar=None if setting.kind.switch else setting.kind.metavar,
        help=setting.help + shown,
        show_default=False,
        rich_help_panel=setting.group,
        hidden=setting.rare or setting.name == "model",
    )
    return _parameter(setting.name, Annotated[kind | None, info])


def _all(command: str) -> inspect.Parameter:
    def show(wanted: bool) -> None:
        if wanted:
            print(table(command))
            raise typer.Exit

    info = typer.Option(
        "--help-all", is_eager=True, callback=show, help="All settings, with YAML and env names"
    )
    return _parameter("help_all", Annotated[bool, info]).replace(default=False)
