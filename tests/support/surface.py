"""Everything of the product that others see, as text: commands, settings, routes, metrics, messages, files.

    python -m tests.support.surface             print it
    python -m tests.support.surface --write     write it to tests/support/surface.txt

A change of the code that is no change for users leaves the text as it is. So help texts and descriptions are left out,
and so are the names of modules and everything that depends on the machine. `tests/unit/test_surface.py` compares the
committed file with the code.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import diptych.config.fields as setting_fields
from diptych.channel.frames import HEADER
from diptych.config.fields import list_settings
from diptych.config.options import Config
from diptych.config.schema import yaml_schema
from diptych.config.values import format_value
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.messages import ToGateway, ToWorker
from diptych.specs import GatewaySpec, WorkerSpec
from kvtransfer.ticket import StagingHint, Ticket
from kvtransfer.transports.nixl import NixlEndpoint
from kvtransfer.transports.shm import ShmEndpoint
from planner.replan.journal import JournalLine
from services.cli.serve.file_schemas import MODELS, render_schema
from services.gateway.metrics.traffic_feed import ReplanReport, TrafficEvents
from services.gateway.openai.schemas.batch_schema import LineResult
from services.gateway.ops.admin import DrainRequest, OrderAccepted, SwitchRoleRequest
from services.gateway.preparation.line_check import BatchLine
from services.host import exit_codes
from tests.support.surface_commands import describe_commands
from tests.support.surface_gateway import (
    describe_metrics,
    describe_request_log,
    describe_routes,
    openapi_document,
)
from tests.support.surface_structs import describe_structs, union_names, value_text

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".txt")
HEAD = "What others see of Diptych. Made by `python -m tests.support.surface --write`."
# Longest line of a JSON document, if it can be broken.
MAX_WIDTH = 140
# Texts for people in a JSON Schema or an OpenAPI document.
DESCRIPTIONS = ("description", "summary")
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Za-z0-9]+)+")
# Texts in the code that look like environment variables, and are something else.
NO_VARIABLES = {"BLOCK_D", "PCI_BUS_ID", "SC_OPEN_MAX", "STRICT_PACK"}
# Texts in quotes, and what an environment is asked for, whatever it looks like.
QUOTED = re.compile(r"""["']([A-Z]\w+)["']""")
HEADER_NAME = re.compile(r"""["'](x-[a-z-]+)["']""")
ASKED = re.compile(r"""\b(?:environ(?:\.\w+\(|\[)|getenv\()["'](\w+)["']""")


@cache
def packages() -> frozenset[str]:
    """The packages of the product."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return frozenset(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def describe_settings() -> Iterator[str]:
    """One line for each setting with all its names, its default and its listing; below it, the values it may have."""
    schemas = yaml_schema()["properties"]
    for one in list_settings(Config):
        parts = [one.name, one.flag, one.env, one.kind.metavar]
        parts += [f"default {value_text(_plain(one.default))}"]
        parts += [f"shown {one.shown!r}"] if one.shown != format_value(one.default) else []
        parts += [name for name in ("switch", "many") if getattr(one.kind, name)]
        # A setting may be listed by one command's help and not by another's.
        listed = [f"{name}{' (rare)' if _is_rare(one.name, name) else ''}" for name in one.commands]
        yield "; ".join([*parts, f"{one.group!r} of {', '.join(listed)}", *(["help"] if one.help else [])])
        yield f"  {json.dumps(drop_descriptions(schemas[one.name]), sort_keys=True, ensure_ascii=False)}"


def _is_rare(setting: str, command: str) -> bool:
    return next(one.rare for one in list_settings(Config, command) if one.name == setting)


def _plain(value: Any) -> Any:
    return value.as_posix() if isinstance(value, Path) else value


def describe_variables() -> list[str]:
    """The environment variables that the product reads or sets, but for the settings."""
    named = {value for value in vars(setting_fields).values() if isinstance(value, str)} | find_in_code(
        QUOTED
    )
    found = {name for name in named if VARIABLE.fullmatch(name)} - NO_VARIABLES
    return sorted((found | find_in_code(ASKED)) - {one.env for one in list_settings(Config)})


def find_in_code(pattern: re.Pattern[str]) -> set[str]:
    """What a pattern with one group finds in the source files of the product."""
    return {name for text in _source_texts() for name in pattern.findall(text)}


@cache
def _source_texts() -> list[str]:
    files = [file for package in packages() for file in (ROOT / package).rglob("*.py")]
    return [file.read_text(encoding="utf-8") for file in files]


def describe_failures() -> Iterator[str]:
    """One line for each reason of a failure, as the client sees it; then the exit statuses of the command."""
    for reason in sorted(FailureReason):
        failure = RequestFailure(reason, "")
        fault = "client" if failure.is_clients_fault else "service"
        retry = "no retry" if failure.retry_after_s is None else f"retry after {failure.retry_after_s:g} s"
        yield f"{reason} {failure.status} {failure.code} {failure.kind}; {retry}; fault of the {fault}"
    for name, status in sorted(vars(exit_codes).items()):
        if name.isupper() and isinstance(status, int):
            yield f"exit {status} {name.lower()}"


def describe_channel() -> list[str]:
    """The messages of the channel, and what they carry as bytes: tickets, hints and endpoints."""
    unions = {"to workers": ToWorker, "to the gateway": ToGateway}
    carried = (Ticket, StagingHint, NixlEndpoint, ShmEndpoint)
    return [
        f"header {HEADER.format}",
        *(f"{name}: {', '.join(union_names(union))}" for name, union in unions.items()),
        *describe_structs([*unions.values(), *carried]),
    ]


def describe_schemas() -> Iterator[str]:
    """The JSON Schemas of plan and profile files."""
    for name in sorted(MODELS):
        yield from (f"{name}:", *render_json(json.loads(render_schema(name))))


def describe_benchmarks() -> Iterator[str]:
    """One line for each program in benchmarks/, with the flags that its own file declares."""
    for file in sorted((ROOT / "benchmarks").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            yield " ".join([f"{file.stem}:", *sorted(_flags_in(ast.parse(text)))])


def _flags_in(tree: ast.Module) -> set[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    declared = [node for node in calls if ast.unparse(node.func).endswith(".add_argument")]
    values = [argument for node in declared for argument in node.args]
    return {str(one.value) for one in values if isinstance(one, ast.Constant)}


def drop_descriptions(document: Any) -> Any:
    """A JSON document without its texts for people. A field of such a name is no text, and stays."""
    if isinstance(document, dict):
        return {
            name: drop_descriptions(value)
            for name, value in document.items()
            if not (name in DESCRIPTIONS and isinstance(value, str))
        }
    return [*map(drop_descriptions, document)] if isinstance(document, list) else document


def render_json(document: Any) -> list[str]:
    """A JSON document without texts for people: keys are sorted, and what fits in a line is in one.

    What does not fit is indented below its name, without brackets; the entries of a list begin with a dash.
    """
    return [*_json_lines(drop_descriptions(document), 0)]


def _json_lines(value: Any, depth: int) -> Iterator[str]:
    is_object = isinstance(value, dict)
    for name, part in sorted(value.items()) if is_object else enumerate(value):
        start = " " * depth + (f"{name}:" if is_object else "-")
        line = f"{start} {json.dumps(part, sort_keys=True, ensure_ascii=False)}"
        if len(line) <= MAX_WIDTH or not isinstance(part, dict | list) or _is_flat(part):
            yield line
        else:
            yield start
            yield from _json_lines(part, depth + 1)


def _is_flat(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(part, dict | list) for part in value)


SECTIONS: dict[str, Callable[[], Iterable[str]]] = {
    "Commands": describe_commands,
    "Settings": describe_settings,
    "Other environment variables": describe_variables,
    "HTTP routes": describe_routes,
    "HTTP headers that begin with x-": lambda: sorted(find_in_code(HEADER_NAME)),
    "/openapi.json": lambda: render_json(openapi_document()),
    "Bodies and files that it leaves out": lambda: describe_structs(
        [DrainRequest, SwitchRoleRequest, OrderAccepted, ReplanReport, TrafficEvents, BatchLine, LineResult]
    ),
    "Failures": describe_failures,
    "Metrics": lambda: describe_metrics(packages()),
    "Channel messages": describe_channel,
    "Specifications of processes": lambda: describe_structs([WorkerSpec, GatewaySpec]),
    "Schemas of plan and profile": describe_schemas,
    "Replan journal": lambda: describe_structs([JournalLine]),
    "Request log": describe_request_log,
    "Benchmarks": describe_benchmarks,
}


def render_surface() -> str:
    """The text, with placeholders for this checkout and the user's home folder."""
    parts = [HEAD, *("\n".join([f"== {title}", *describe()]) for title, describe in SECTIONS.items())]
    text = "\n\n".join(parts) + "\n"
    for folder, placeholder in ((ROOT, "<checkout>"), (Path.home(), "<home>")):
        text = re.sub(rf"{re.escape(str(folder))}(?![\w.-])", placeholder, text) if folder.name else text
    return text


def main() -> None:
    """Print the text, or write it to its file."""
    parser = argparse.ArgumentParser(description="Print everything of the product that others see.")
    parser.add_argument("--write", action="store_true", help=f"write it to {FILE.name} beside this program")
    if parser.parse_args().write:
        FILE.write_text(render_surface(), encoding="utf-8")
    else:
        print(render_surface(), end="")


if __name__ == "__main__":
    main()
