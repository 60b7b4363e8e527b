"""The flags of the commands that ask a gateway that runs: `chat`, `status`, `drain`, `switch-role`.

What they do is in `services.cli.client.chat`, `services.cli.client.status` and `services.cli.client.admin`,
imported when they run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any

import typer

from diptych.errors import ConfigError

URL_ENV = "DIPTYCH_URL"
DEFAULT_URL = "http://127.0.0.1:8000"


def _lazy_function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(f"services.cli.client.{module}"), name)
    return function


UrlOption = Annotated[str, typer.Option("--url", envvar=URL_ENV, help="Where the gateway is")]
ApiKeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="DIPTYCH_API_KEY", help="Bearer key", show_default=False)
]


def chat(
    message: Annotated[
        str | None, typer.Argument(help="Ask this and end; without it, a conversation")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    model: Annotated[
        str | None, typer.Option(help="Default: the first one served", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.7,
) -> None:
    """Talk to a served model; answers are streamed."""
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    raise typer.Exit(_lazy_function("chat", "run_chat")(url, api_key, model, system, message, sampling))


def status(
    url: UrlOption = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As the gateway says it")] = False,
) -> None:
    """What is running: workers, links, KV in use. Exit status 1 when not ready."""
    raise typer.Exit(_lazy_function("status", "print_status")(url, api_key, as_json))


AdminKeyOption = Annotated[
    str | None,
    typer.Option(
        "--admin-key", envvar="DIPTYCH_ADMIN_KEY", help="The gateway's admin key", show_default=False
    ),
]
WorkerArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The worker, as `diptych status` names it")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Even if it is the last one of its role")]


def drain(
    name: WorkerArgument,
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
    force: ForceOption = False,
) -> None:
    """Let a worker end once its requests are done; it is not started again."""
    raise typer.Exit(_lazy_function("admin", "drain_worker")(url, admin_key, name, force))


def switch_role(
    name: WorkerArgument,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill or decode")],
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
    force: ForceOption = False,
) -> None:
    """Let a worker change pool: it ends its requests, and goes on in the other role with the same weights."""
    _check_role(role)
    raise typer.Exit(_lazy_function("admin", "switch_role")(url, admin_key, name, role, force))


def _check_role(role: str) -> None:
    if role not in ("prefill", "decode"):
        raise ConfigError(
            f"there is no role {role!r}", "a worker prefills prompts or decodes answers", "prefill or decode"
        )
