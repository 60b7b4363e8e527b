"""`diptych`: the command line.

A command's flags live in a module of their own, and what it does in another; each is imported when it is needed. So
`diptych --help` reads no settings, `diptych status` loads neither them nor an HTTP library, and `diptych serve` forks
its guard before Ray is loaded.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from diptych.errors import ConfigError, DiptychError
from services.host.exit_codes import FAILED, USAGE

SERVE = """Serve a model from two pools: prefill workers run prompts, decode workers generate answers.

\b
  diptych serve            the embedded model on http://127.0.0.1:8000
  diptych serve Qwen/Qwen2.5-0.5B-Instruct --decode 2 --port 9000
  diptych serve ./my-model --config deployment.yaml --slo-ttft-ms 500
"""
WORKER = "One worker by itself, without Ray; ROLE is prefill or decode."
GATEWAY = "The gateway by itself, without Ray."
SETTINGS_EPILOG = "All settings with their YAML and environment names: --help-all, and docs/configuration.md"
MARKUP: Literal["rich"] = "rich"


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command: `services.cli.<module>` has a function of the command's name, with `_` for `-`.

    `summary` is the beginning of its help, which the list of commands shows. `help` is all of it; None: the function's
    docstring, or the constant HELP of its module.
    """

    module: str
    summary: str
    help: str | None = None
    # Whether its flags are settings, some of which are shown only by --help-all.
    settings: bool = False


COMMANDS = {
    "serve": CommandEntry("serve.commands", SERVE.partition("\n")[0], SERVE, settings=True),
    "worker": CommandEntry("serve.commands", WORKER, WORKER, settings=True),
    "gateway": CommandEntry("serve.commands", GATEWAY, GATEWAY, settings=True),
    "chat": CommandEntry("client.flags", "Talk to a served model; answers are streamed."),
    "status": CommandEntry(
        "client.flags", "What is running: workers, links, KV in use. Exit status 1 when not ready."
    ),
    "drain": CommandEntry(
        "client.flags", "Let a worker end once its requests are done; it is not started again."
    ),
    "switch-role": CommandEntry(
        "client.flags",
        "Let a worker change pool: it ends its requests, and goes on in the other role with the same weights.",
    ),
    "bench": CommandEntry(
        "bench",
        "Measure a served model under load: requests come when they are due, whether others are answered or not.",
    ),
    "dashboards": CommandEntry(
        "dashboards", "Write Grafana dashboards, and Prometheus' rules and alerts, for a deployment's SLOs."
    ),
    "keys": CommandEntry(
        "offline", "Make the channel keys that a gateway and its workers share when they are started apart."
    ),
    "replay": CommandEntry(
        "offline",
        "Decide again, offline, what a decision log says was decided. Exit status 1 if anything comes out differently.",
    ),
    "simulate": CommandEntry(
        "simulate.flags", "Requests through a deployment that is only numbers, in virtual time."
    ),
    "plan": CommandEntry(
        "plan.flags",
        "Find the deployment with the highest goodput within the SLOs: how many instances, how parallel, which kind.",
    ),
    "profile": CommandEntry(
        "profile.flags",
        "Measure this machine's workers for the planner: step costs, room for KV, and what a request costs beside.",
    ),
    "calibrate": CommandEntry(
        "calibrate.flags",
        "Fit the KV codecs nuq*, factors for int* and tq*, and evictions to a model; measure what each codec costs.",
    ),
    "version": CommandEntry("offline", "Versions of diptych and of what matters to it."),
}


class LazyCommandGroup(TyperGroup):
    """All commands by name and summary; the one that is called is imported."""

    def __init__(self, **attributes: Any) -> None:
        brief = {
            name: TyperCommand(name, help=entry.summary, rich_markup_mode=MARKUP)
            for name, entry in COMMANDS.items()
        }
        super().__init__(**(attributes | {"commands": brief}))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is named first, with all its flags."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_command(name), rest


def load_command(name: str) -> Any:
    """One of `COMMANDS`, whole."""
    entry = COMMANDS[name]
    module = importlib.import_module(f"services.cli.{entry.module}")
    cls: Any = (
        importlib.import_module("services.cli.serve.settings_flags").SettingsCommand
        if entry.settings
        else TyperCommand
    )
    info = CommandInfo(
        name=name,
        cls=cls,
        callback=getattr(module, name.replace("-", "_")),
        help=entry.help or getattr(module, "HELP", None),
        epilog=SETTINGS_EPILOG if entry.settings else None,
    )
    return get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=MARKUP)


app = typer.Typer(
    cls=LazyCommandGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
    help="Serve large language models from two pools.",
    epilog="First steps: `diptych serve`, and in another terminal `diptych chat`",
)


@app.callback()
def _group_callback() -> None:
    """Does nothing: its commands do. Without it typer would take the app for an empty one."""


def main() -> None:
    """The entry point: expected errors are three parts in at most six lines, and never a traceback."""
    try:
        app()
    except DiptychError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        sys.exit(USAGE if isinstance(error, ConfigError) else FAILED)


if __name__ == "__main__":
    main()
