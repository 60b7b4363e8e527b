"""Where values of settings come from: the YAML file, the environment, the command line.

Each source is one of pydantic-settings' with our names and messages, and `origins` says for each value where it was
found, in the order in which the source names them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource, YamlConfigSettingsSource

from diptych.config.fields import CONFIG_ENV, ENV_PREFIX, URL_ENV, list_settings
from diptych.config.values import show_value
from diptych.errors import ConfigError

# Variables that Kubernetes sets in every container for a Service called "diptych" or "diptych-decode". Such names are
# not settings.
SERVICE_NAME = re.compile(
    r".+_SERVICE_HOST|.+_SERVICE_PORT(_.+)?|.+_PORT_[0-9]+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?"
)
MAX_FILE_BYTES = 1 << 20  # of the YAML file
SERVICE_PORT, SERVICE_URL = re.compile(r".+_PORT"), re.compile(r"(tcp|udp|sctp)://")


class SettingsSource(Protocol):
    """A source of pydantic-settings that also knows where it found each value."""

    # Where each value was found, by name of the setting.
    origins: dict[str, str]

    def __call__(self) -> dict[str, Any]:
        """The raw values, by name of the setting."""
        ...


class FileSource(YamlConfigSettingsSource):
    """A YAML file with one `name: value` per line, with dashes or underscores.

    Raises:
        ConfigError: the file cannot be read, is not a YAML mapping, or has a key that is no setting.
    """

    def __init__(self, config: type[BaseSettings], file: Path) -> None:
        self.known = [one.name for one in list_settings(config)]
        self.origins: dict[str, str] = {}
        self._file = file  # the library takes the path "." for no file
        super().__init__(config, file)

    def _read_files(self, files: Any, deep_merge: bool = False) -> dict[str, Any]:
        """The library passes over a file that is not there, and over pipes; here the first is an error."""
        values: dict[str, Any] = {}
        spellings: dict[str, str] = {}
        for key, value in _read_mapping(self._file).items():
            # vLLM's files write keys with the dashes of the flags.
            name = str(key).replace("-", "_")
            if name not in self.known:
                raise ConfigError(
                    f"unknown key {show_value(str(key))} in {self._file}",
                    _did_you_mean(name, self.known),
                    "see docs/configuration.md",
                )
            if name in spellings:
                raise ConfigError(
                    f"{name} is set twice in {self._file}",
                    f"as {spellings[name]!r} and as {key!r}",
                    "leave out one of them",
                )
            spellings[name] = str(key)
            if value is not None:
                values[name] = value
                self.origins[name] = f"{key} in {self._file}"
        return values


def _read_mapping(file: Path) -> dict[Any, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"the configuration file {file} cannot be read", error.strerror or str(error)
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"the configuration file {file} has more than {MAX_FILE_BYTES >> 20} MiB")
    try:
        tree = yaml.safe_load(content.decode("utf-8"))
    # The library's own messages quote the file, which may hold keys.
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise ConfigError(f"{file} is not YAML", f"{where} cannot be read: {_yaml_advice(error)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not YAML", f"byte {error.start} is not UTF-8") from None
    except (yaml.YAMLError, ValueError):
        raise ConfigError(
            f"{file} is not YAML", "it has a character or a number that YAML cannot hold"
        ) from None
    except RecursionError:
        raise ConfigError(f"{file} is not a list of settings", "it is nested too deeply") from None
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{file} is not a list of settings", fix="write one 'name: value' per line")
    return tree or {}


def _yaml_advice(error: yaml.MarkedYAMLError) -> str:
    """What to look for, without a word of the file."""
    if isinstance(error, yaml.scanner.ScannerError):
        return "a quote or a bracket may be open, or a text with ':', '@', '%' or a tab may need quotes"
    return "an alias, a tag, a bracket or an indentation is wrong"


class EnvironmentSource(EnvSettingsSource):
    """Environment names such as `DIPTYCH_PORT`; an empty value is none.

    Raises:
        ConfigError: a name is nearly, but not quite, one of ours.
    """

    def __init__(self, config: type[BaseSettings], environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.origins: dict[str, str] = {}
        super().__init__(config)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        """The values by lower-case name, as the library looks for them."""
        by_env = {one.env: one.name for one in list_settings(self.settings_cls)}
        for name, value in sorted(self.environ.items()):
            if _is_service_variable(name, value):
                continue
            if name in by_env:
                if value != "":
                    self.origins[by_env[name]] = name
            elif name.startswith(ENV_PREFIX) and name not in (CONFIG_ENV, URL_ENV):
                # Only near misses are refused, since other programs may use names with the same beginning.
                meant = _did_you_mean(name, by_env, cutoff=0.85)
                if meant:
                    raise ConfigError(
                        f"unknown environment name {name}", meant, f"rename it, or `unset {name}`"
                    )
        return {name.lower(): self.environ[name] for name in self.origins.values()}


class CommandLineSource(InitSettingsSource):
    """What the command line said, by setting name; None and empty lists are unset."""

    def __init__(self, config: type[BaseSettings], given: Mapping[str, Any]) -> None:
        flags = {one.name: one.flag for one in list_settings(config)}
        values = {name: value for name, value in given.items() if value not in (None, (), [])}
        self.origins = {name: flags[name] for name in values}
        super().__init__(config, values)


def _is_service_variable(name: str, value: str) -> bool:
    """Whether an orchestrator has set this name to tell where a service is: it is no setting of ours."""
    if SERVICE_PORT.fullmatch(name) and SERVICE_URL.match(value):
        return True
    return SERVICE_NAME.fullmatch(name) is not None


def _did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else ""
