"""Lines of batches for tests, and what tests ask of their results."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import openai
from openai.types import Batch

from tests.support.deployment import wait_for
from tests.system.scripted_gateway import Running

MINE, YOURS = "key-of-mine-0123456789", "key-of-yours-012345678"
MAX_FILE_BYTES = 1 << 20
CHAT: Final = "/v1/chat/completions"
COMPLETION: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
ENDED = {"failed", "completed", "expired", "cancelled"}


def chat_body(text: str = "hi", model: str = "toy", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4} | fields


@contextlib.contextmanager
def client_of(gateway: Running, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.api, api_key=key, max_retries=0) as client:
        yield client


def kept(gateway: Running) -> set[Path]:
    assert gateway.batches is not None
    folder = gateway.batches.store.data_dir
    return {*folder.files.iterdir(), *folder.uploads.iterdir()}


def input_file(bodies: Iterable[tuple[str, dict[str, Any]]], url: str = CHAT) -> bytes:
    """An input file with these custom_ids and bodies."""
    lines = ({"custom_id": name, "method": "POST", "url": url, "body": body} for name, body in bodies)
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def start(client: openai.OpenAI, content: bytes, url: Any = CHAT, **fields: Any) -> Batch:
    """A batch of an uploaded file."""
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    options: dict[str, Any] = {"completion_window": "24h"} | fields
    return client.batches.create(input_file_id=file.id, endpoint=url, **options)


def finished(client: openai.OpenAI, batch: str) -> Batch:
    """The batch, once it has ended."""
    wait_for(
        lambda: client.batches.retrieve(batch).status in ENDED, explain=lambda: client.batches.retrieve(batch)
    )
    return client.batches.retrieve(batch)


def results(client: openai.OpenAI, file: str | None) -> dict[str, dict[str, Any]]:
    """The results in a file by custom_id; each must be there once, and every line whole."""
    if file is None:
        return {}
    text = client.files.content(file).content
    assert text.endswith(b"\n")
    rows = [json.loads(row) for row in text.decode().splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows), "a line has two results"
    assert len({row["id"] for row in rows}) == len(rows)
    return found


def answers_of(body: dict[str, Any]) -> tuple[Any, Any]:
    """What must be equal in two answers to the same body; ids and times differ, and so may what was cached."""
    usage = body["usage"]
    return body["choices"], (usage["prompt_tokens"], usage["completion_tokens"])


THREE = input_file([("a", chat_body()), ("b", chat_body(n=2)), ("c", chat_body(max_tokens=-1))])
