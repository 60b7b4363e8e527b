"""`diptych chat`: a client of a gateway that is already there."""

from __future__ import annotations

import json
import ssl
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from diptych.errors import StartError
from services.cli.client.gateway_http import (
    CONNECT_TIMEOUT_S,
    base_url,
    bearer_header,
    refused_error,
    unreachable_error,
)

ANSWER_TIMEOUT_S = 600.0
LEAVE_COMMANDS = ("/quit", "/exit", "/bye")


def http_client(url: str, key: str | None) -> httpx.Client:
    """A client of one gateway; proxies of the environment are not asked for what is usually this machine."""
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    return httpx.Client(
        base_url=base_url(url),
        headers=bearer_header(key),
        timeout=timeout,
        trust_env=False,
        # As the other commands: what this machine trusts, or `SSL_CERT_FILE` names.
        verify=ssl.create_default_context() if url.startswith("https:") else True,
    )


# ---- chat


def run_chat(
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
    with http_client(url, key) as gateway:
        try:
            name = model or _first_model(gateway)
            for asked in _read_questions(message, name):
                history.append({"role": "user", "content": asked})
                said = _print_answer(
                    _stream_answer(gateway, {"model": name, "messages": history, "stream": True, **sampling})
                )
                history.append({"role": "assistant", "content": said})
        except httpx.HTTPError as error:
            raise unreachable_error(url, error) from None
        except KeyboardInterrupt:
            print()
    return 0


def _first_model(gateway: httpx.Client) -> str:
    answer = gateway.get("/v1/models")
    if answer.status_code != 200:
        raise refused_error(answer.status_code, answer.content)
    return str(answer.json()["data"][0]["id"])


def _read_questions(message: str | None, name: str) -> Iterator[str]:
    if message is not None:
        yield message
        return
    asking = sys.stdin.isatty()
    if asking:
        print(f"{name}. An empty line is ignored; {LEAVE_COMMANDS[0]} or Ctrl-D ends.")
    while True:
        try:
            line = input("> " if asking else "").strip()
        except EOFError:
            return
        if line in LEAVE_COMMANDS:
            return
        if line:
            yield line


def _print_answer(parts: Iterator[str]) -> str:
    said = []
    for part in parts:
        print(part, end="", flush=True)
        said.append(part)
    print()
    return "".join(said)


def _stream_answer(gateway: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """The pieces of one streamed answer.

    Raises:
        StartError: refused, or an error event after the stream began.
    """
    with gateway.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            raise refused_error(answer.status_code, answer.content)
        for line in answer.iter_lines():
            content = line.removeprefix("data: ")
            if not line.startswith("data: ") or content == "[DONE]":
                continue
            event = json.loads(content)
            if "error" in event:
                raise StartError("the answer broke off", str(event["error"].get("message")), "ask again")
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
