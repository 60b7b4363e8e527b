"""`diptych chat` and `diptych status`: clients of a gateway that is already there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from diptych.errors import ConfigError, StartError

CONNECT_S, ANSWER_S = 5.0, 600.0
LEAVE = ("/quit", "/exit", "/bye")
COLUMNS = {  # of the table of workers: title, and its key in /status
    "worker": "worker",
    "role": "role",
    "state": "state",
    "running": "running",
    "waiting": "waiting",
    "KV used": "slabs_used",
    "KV cached": "slabs_cached",
    "KV slabs": "slabs_total",
    "leases": "leases",
}


def bearer(key: str | None) -> dict[bytes, bytes]:
    """The header that shows a key.

    Raises:
        ConfigError: no header can hold it.
    """
    if not key:
        return {}
    if not key.isprintable():
        raise ConfigError(
            "the key cannot be sent", "it has a line break or another control character", "one line, no tabs"
        )
    return {b"Authorization": f"Bearer {key}".encode()}


def client(url: str, key: str | None) -> httpx.Client:
    """A client of one gateway; proxies of the environment are not asked for what is usually this machine."""
    url = url.rstrip("/").removesuffix("/v1")
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
    return httpx.Client(base_url=url, headers=bearer(key), timeout=timeout, trust_env=False)


def unreachable(url: str, error: httpx.HTTPError) -> StartError:
    """Nobody is there."""
    why = str(error) or type(error).__name__
    return StartError(
        f"no gateway answers at {url}", why, "start one with `diptych serve`, or name another with --url"
    )


def refused(answer: httpx.Response) -> StartError:
    """What the gateway said, from OpenAI's error body when it is one."""
    try:
        why = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        why = answer.text[:300]
    fix = "--api-key KEY, or DIPTYCH_API_KEY in the environment" if answer.status_code == 401 else ""
    return StartError(f"the gateway answered {answer.status_code}", why, fix)


# ---- chat


def chat(
    url: str,
    key: str | None,
    model: str | None,
    system: str | None,
    message: str | None,
    sampling: dict[str, Any],
) -> int:
    """One question, or a conversation until end of input. Returns the exit status.

    Raises:
        StartError: nothing answers there, or it refuses.
    """
    history: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    with client(url, key) as gateway:
        try:
            name = model or _first_model(gateway)
            for asked in _questions(message, name):
                history.append({"role": "user", "content": asked})
                said = _say(
                    _stream(gateway, {"model": name, "messages": history, "stream": True, **sampling})
                )
                history.append({"role": "assistant", "content": said})
        except httpx.HTTPError as error:
            raise unreachable(url, error) from None
        except KeyboardInterrupt:
            print()
    return 0


def _first_model(gateway: httpx.Client) -> str:
    answer = gateway.get("/v1/models")
    if answer.status_code != 200:
        raise refused(answer)
    return str(answer.json()["data"][0]["id"])


def _questions(message: str | None, name: str) -> Iterator[str]:
    if message is not None:
        yield message
        return
    asking = sys.stdin.isatty()
    if asking:
        print(f"{name}. An empty line is ignored; {LEAVE[0]} or Ctrl-D ends.")
    while True:
        try:
            line = input("> " if asking else "").strip()
        except EOFError:
            return
        if line in LEAVE:
            return
        if line:
            yield line


def _say(parts: Iterator[str]) -> str:
    said = []
    for part in parts:
        print(part, end="", flush=True)
        said.append(part)
    print()
    return "".join(said)


def _stream(gateway: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """The pieces of one streamed answer.

    Raises:
        StartError: refused, or an error event after the stream began.
    """
    with gateway.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            raise refused(answer)
        for line in answer.iter_lines():
            content = line.removeprefix("data: ")
            if not line.startswith("data: ") or content == "[DONE]":
                continue
            event = json.loads(content)
            if "error" in event:
                raise StartError("the answer broke off", str(event["error"].get("message")), "ask again")
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


# ---- status


@dataclass(frozen=True, slots=True)
class State:
    """What `/status` says, as far as it is shown."""

    ready: bool
    reasons: list[str]  # why not, or what is missing
    workers: list[dict[str, Any]]
    links: list[str]
    told: dict[str, Any]


def state(told: dict[str, Any]) -> State:
    """Read the body of `GET /status`."""
    links = [
        f"{one['source']} → {one['target']} {one['transport']} {one['gb_per_s']:.1f} GB/s {one['latency_us']:.0f} µs"
        for one in told.get("links", [])
        if one.get("transport")
    ]
    return State(
        bool(told.get("ready")), list(told.get("reasons", [])), list(told.get("workers", [])), links, told
    )


def status(url: str, key: str | None, as_json: bool) -> int:
    """Print what the gateway says of itself; exit status 1 when it is not ready."""
    with client(url, key) as gateway:
        try:
            answer = gateway.get("/status", timeout=CONNECT_S)
        except httpx.HTTPError as error:
            raise unreachable(url, error) from None
    if answer.status_code != 200:
        raise refused(answer)
    now = state(answer.json())
    if as_json:
        print(json.dumps(now.told, indent=2))
    else:
        _print(now)
    return 0 if now.ready else 1


def _hits(books: dict[str, Any]) -> str:
    """The part of the prompt tokens looked up in the prefix cache that was found there; empty before any was."""
    asked, found = books.get("prefix_queries", 0), books.get("prefix_hits", 0)
    return f"{found / asked:.0%}" if asked else ""


def _print(now: State) -> None:
    console = Console()
    console.print("ready" if now.ready else "not ready", style="green" if now.ready else "red")
    for reason in now.reasons:
        console.print(f"  {reason}", markup=False, highlight=False)
    grid = Table(*COLUMNS, "prefix hits", box=None, padding=(0, 1, 0, 0))
    for title, column in zip(
        [*COLUMNS, "prefix hits"], grid.columns, strict=True
    ):  # titles wrap, and are not cut
        column.min_width = max(map(len, title.split()))
    for column in grid.columns[:3]:
        column.no_wrap = True
    for one in now.workers:
        flat = one | one.get("stats", {})
        grid.add_row(*(str(flat.get(key, "")) for key in COLUMNS.values()), _hits(flat))
    console.print(grid)
    for link in now.links:
        console.print(link, highlight=False)
