"""`diptych`: the command line.

Commands live in modules of their own, which are imported only when they run: `diptych --help` needs neither torch nor
Ray, and `diptych serve` forks its guard before either is loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.errors import ConfigError, DiptychError
from diptych.load import URL_ENV, Loaded
from services.cli.bench import bench
from services.cli.guard import guarded
from services.cli.options import Command, bind
from services.cli.plan_options import HELP as PLAN
from services.cli.plan_options import plan
from services.cli.profile import HELP as PROFILE
from services.cli.profile import profile
from services.cli.simulate_options import HELP as SIMULATE
from services.cli.simulate_options import simulate
from services.cli.stop import FAILED, USAGE
from services.cluster.environment import prepare_ray

DEFAULT_URL = "http://127.0.0.1:8000"

SERVE = """Serve a model from two pools: prefill workers read prompts, decode workers write answers.

\b
  diptych serve            the embedded model on http://127.0.0.1:8000
  diptych serve Qwen/Qwen2.5-0.5B-Instruct --decode 2 --port 9000
  diptych serve ./my-model --config deployment.yaml --slo-ttft-ms 500
"""
MORE = "All settings with their YAML and environment names: --help-all, and docs/configuration.md"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Serve large language models from two pools.",
    epilog="First steps: `diptych serve`, and in another terminal `diptych chat`",
)


def _later(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(f"services.cli.{module}"), name)
    return function


def _serve(loaded: Loaded) -> int:
    settled, answer = _later("planned", "planned")(loaded)
    _later("replanning", "check")(settled)

    def run(folder: Path) -> int:
        prepare_ray(os.environ)
        return int(_later("serve", "serve")(settled, answer, folder))

    return guarded(run)


def _worker(loaded: Loaded) -> int:
    return guarded(lambda _folder: int(_later("alone", "worker")(loaded)))


def _gateway(loaded: Loaded) -> int:
    return guarded(lambda _folder: int(_later("alone", "gateway")(loaded)))


app.command("serve", cls=Command, help=SERVE, epilog=MORE)(bind("serve", _serve))
app.command(
    "worker", cls=Command, help="One worker by itself, without Ray; ROLE is prefill or decode.", epilog=MORE
)(bind("worker", _worker, place="role"))
app.command("gateway", cls=Command, help="The gateway by itself, without Ray.", epilog=MORE)(
    bind("gateway", _gateway)
)

Url = Annotated[str, typer.Option("--url", envvar=URL_ENV, help="Where the gateway is")]
Key = Annotated[
    str | None, typer.Option("--api-key", envvar="DIPTYCH_API_KEY", help="Bearer key", show_default=False)
]


@app.command()
def chat(
    message: Annotated[
        str | None, typer.Argument(help="Ask this and end; without it, a conversation")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    model: Annotated[
        str | None, typer.Option(help="Default: the first one served", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.7,
) -> None:
    """Talk to a served model; answers are streamed."""
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    raise typer.Exit(_later("talk", "chat")(url, api_key, model, system, message, sampling))


@app.command()
def status(
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="As the gateway says it")] = False,
) -> None:
    """What is running: workers, links, KV in use. Exit status 1 when not ready."""
    raise typer.Exit(_later("talk", "status")(url, api_key, as_json))


Admin = Annotated[
    str | None,
    typer.Option(
        "--admin-key", envvar="DIPTYCH_ADMIN_KEY", help="The gateway's admin key", show_default=False
    ),
]
Named = Annotated[str, typer.Argument(metavar="NAME", help="The worker, as `diptych status` names it")]
Force = Annotated[bool, typer.Option("--force", help="Even if it is the last one of its role")]


@app.command()
def drain(name: Named, url: Url = DEFAULT_URL, admin_key: Admin = None, force: Force = False) -> None:
    """Let a worker end once its requests are done; it is not started again."""
    raise typer.Exit(_later("admin", "drain")(url, admin_key, name, force))


@app.command()
def turn(
    name: Named,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill or decode")],
    url: Url = DEFAULT_URL,
    admin_key: Admin = None,
    force: Force = False,
) -> None:
    """Let a worker change pool: it ends its requests, and goes on in the other role with the same weights."""
    if role not in ("prefill", "decode"):
        raise ConfigError(
            f"there is no role {role!r}", "a worker reads prompts or writes answers", "prefill or decode"
        )
    raise typer.Exit(_later("admin", "turn")(url, admin_key, name, role, force))


app.command()(bench)


@app.command()
def keys(folder: Annotated[Path, typer.Argument(help="Folder to write them to")]) -> None:
    """Make the channel keys that a gateway and its workers share when they are started apart."""
    _later("alone", "keys")(folder)


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="What --replan-journal wrote")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object")] = False,
) -> None:
    """Decide again, offline, what a decision log says was decided. Exit status 1 if anything comes out differently."""
    raise typer.Exit(_later("replay", "run")(log, as_json))


app.command("simulate", help=SIMULATE)(simulate)
app.command("plan", help=PLAN)(plan)
app.command("profile", help=PROFILE)(profile)


@app.command()
def version() -> None:
    """Versions of diptych and of what matters to it."""
    _later("versions", "show")()


def main() -> None:
    """The entry point: expected errors are three parts in at most six lines, and never a traceback."""
    try:
        app()
    except DiptychError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        sys.exit(USAGE if isinstance(error, ConfigError) else FAILED)


if __name__ == "__main__":
    main()
