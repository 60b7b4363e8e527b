"""What a setting is: a field of `diptych.config.options.Config` with a flag, a YAML key and an environment name.

A field's annotation says how its value is read (`diptych.config.values.ValueKind`) and where it is listed (`Listing`).
Everything else, including the command line, the generated documents and the messages, is derived from that. Options
of one command, which are no settings, are fields of a dataclass (`option_field`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from diptych.config.values import ValueKind, format_value

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

ENV_PREFIX = "DIPTYCH_"
CONFIG_ENV = ENV_PREFIX + "CONFIG"
# `diptych chat` and `diptych status` read the gateway's address from this variable.
URL_ENV = ENV_PREFIX + "URL"


def option_field(default: Any, help: str, panel: str | None = None, **more: Any) -> Any:
    """A field of a dataclass that is also an option, listed in `panel` by `--help`; one without default: `MISSING`.

    Its flag is that in `more`, else its name, for example `--max-rate`; a switch that is on has `--no-` as well. An
    empty flag makes it an argument by position. All else in `more` goes to `typer.Option`.
    """
    return field(default=default, metadata={"help": help, "rich_help_panel": panel, **more})


def flag_name(name: str) -> str:
    """The command-line flag of a field, for example `--max-model-len`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Listing:
    """Where a setting is listed: part of its field's annotation."""

    group: str
    commands: tuple[str, ...] = ("serve",)
    # The default as text for people; "" shows the value itself.
    shown: str = ""
    # Whether the setting is left out of --help and shown only by --help-all.
    rare: bool = False
    # Commands whose --help leaves the setting out, although others show it.
    rare_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """One setting, under all its names."""

    name: str
    kind: ValueKind
    default: Any
    help: str
    group: str
    commands: tuple[str, ...]
    # The default as text.
    shown: str
    # Whether the setting is left out of --help and shown only by --help-all.
    rare: bool

    @property
    def flag(self) -> str:
        """Its command-line flag, for example `--max-model-len`."""
        return flag_name(self.name)

    @property
    def env(self) -> str:
        """Its environment variable, for example `DIPTYCH_MAX_MODEL_LEN`."""
        return ENV_PREFIX + self.name.upper()


def list_settings(config: type[BaseModel], command: str | None = None) -> list[SettingSpec]:
    """All settings declared in `config`, in order; only those of one command when it is named."""
    found = [_describe_field(name, field, command) for name, field in config.model_fields.items()]
    return [one for one in found if command is None or command in one.commands]


def _describe_field(name: str, field: FieldInfo, command: str | None) -> SettingSpec:
    listing = next(one for one in field.metadata if isinstance(one, Listing))
    # In `Annotated[int, kind] | None`, pydantic keeps the kind inside the annotation.
    inner = [one for part in get_args(field.annotation) for one in getattr(part, "__metadata__", ())]
    kind = next(one for one in (*field.metadata, *inner) if isinstance(one, ValueKind))
    return SettingSpec(
        name=name,
        kind=kind,
        default=field.default,
        help=field.description or "",
        group=listing.group,
        commands=listing.commands,
        shown=listing.shown or format_value(field.default),
        rare=listing.rare or command in listing.rare_for,
    )
