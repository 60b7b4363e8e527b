"""The command line's options, made from the settings of `diptych.config.options.Config`.

Typer collects texts only; `diptych.config.load` reads them, so that flags, environment and YAML are checked
by the same code.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from diptych.config.fields import SettingSpec, list_settings
from diptych.config.load import LoadedConfig, load_config
from diptych.config.options import Config
from diptych.config.schema import render_schema
from diptych.errors import ConfigError
from services.cli.serve.settings_reference import settings_table


class SettingsCommand(TyperCommand):
    """Its help names a switch once: a column of every `--no-` leaves no room for names in 80 columns."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without the `--no-` names. The process ends afterwards, so nobody else misses them."""
        # This changes the command, but a process that shows help ends afterwards.
        for one in self.params:
            one.secondary_opts = []
        super().format_help(ctx, formatter)


def bind_settings(
    command: str, run: Callable[[LoadedConfig], int], place: str = "model"
) -> Callable[..., None]:
    """A function for `typer.Typer.command` whose parameters are the settings of `command`.

    `place` is the setting that may also be given by position.
    """
    parameters = [
        _positional_argument(place),
        _config_option(),
        *map(_setting_option, list_settings(Config, command)),
        _printing_option(
            "help_all", "All settings, with YAML and env names", lambda: settings_table(command)
        ),
        _printing_option("config_schema", "JSON Schema of the YAML file, for editors", render_schema),
    ]

    def invoke(**given: Any) -> None:
        file: Path | None = given.pop("config", None)
        given.pop("help_all", None)
        given.pop("config_schema", None)
        named, placed = given.get(place), given.pop("placed", None)
        if named and placed and named != placed:
            raise ConfigError(
                f"the {place} is given twice", f"{placed!r} and --{place} {named!r}", "leave out one"
            )
        given[place] = placed or named
        raise typer.Exit(run(load_config(command, given, os.environ, file)))

    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    invoke.__annotations__ = {one.name: one.annotation for one in parameters}
    return invoke


def _make_parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _positional_argument(name: str) -> inspect.Parameter:
    help_text = next(setting.help for setting in list_settings(Config) if setting.name == name)
    info = typer.Argument(metavar=name.upper(), help=help_text, show_default=False)
    return _make_parameter("placed", Annotated[str | None, info])


def _config_option() -> inspect.Parameter:
    info = typer.Option("--config", metavar="FILE", help="Settings from a YAML file", show_default=False)
    return _make_parameter("config", Annotated[Path | None, info])


def _setting_option(setting: SettingSpec) -> inspect.Parameter:
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
    return _make_parameter(setting.name, Annotated[kind | None, info])


def _printing_option(name: str, help_text: str, render: Callable[[], str]) -> inspect.Parameter:
    """A flag that prints a text and ends."""

    def show(wanted: bool) -> None:
        if wanted:
            print(render())
            raise typer.Exit

    info = typer.Option(f"--{name.replace('_', '-')}", is_eager=True, callback=show, help=help_text)
    return _make_parameter(name, Annotated[bool, info]).replace(default=False)
