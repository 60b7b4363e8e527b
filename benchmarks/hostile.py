"""Bodies that are as much work as their bounds allow, and a process that sends them: the load of `benchmarks.stall`.

    python -m benchmarks.hostile PORT MODEL CONTEXT KEY [--bodies 2000] [--seed 0] [--concurrency 8] [--seconds 60]

Sends each kind of body at its bound once and `--bodies` random ones, and beside them, without a key, heads that are too
large. All clients of `benchmarks.load.hostile_clients` go on meanwhile, for `--seconds` at least. Prints one JSON
object: how often each status came, how often none did, and what became of the clients' requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.load.hostile_clients import HOSTILE_CLIENTS, NO_ANSWER, HostileTarget

HEADS = (b"a:\r\n" * 60_000, b"a: " + b"b" * 250_000, b"".join(b"x%d: y\r\n" % i for i in range(20_000)))
HEAD_ROUNDS = 20  # of all of them, on each of as many connections as there are clients
BODY_BYTES, SCHEMA_BYTES = (8 << 20) - 4096, (64 << 10) - 256
ANSWER_S = 300.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Aim:
    """The model that is asked for, and its context in tokens."""

    model: str
    context: int


Body = tuple[str, bytes]  # path, content
Make = Callable[[Aim, random.Random, float], Body]  # the number is the size, 0 to 1 of the bound


def _chat(aim: Aim, **fields: Any) -> Body:
    body = {"model": aim.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4} | fields
    return CHAT, json.dumps(body).encode()


def _completion(aim: Aim, **fields: Any) -> Body:
    return COMPLETIONS, json.dumps({"model": aim.model, "max_tokens": 1} | fields).encode()


def _structured(aim: Aim, schema: dict[str, Any]) -> Body:
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return _chat(aim, response_format=asked)


def brackets(aim: Aim, draw: random.Random, size: float) -> Body:
    text = draw.choice(["[)", "[", "(?:", "{1}", "\\", "[^", ")]"])
    return _structured(
        aim, {"type": "object", "description": text * int(SCHEMA_BYTES * size / 2 / len(text))}
    )


def properties(aim: Aim, draw: random.Random, size: float) -> Body:
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer", "minimum": 3},
        {"enum": ["a", "b", draw.random()]},
        {"type": "array", "items": {"type": "number"}},
    ]
    names = {f"p{draw.randrange(10**6)}": draw.choice(kinds) for _ in range(int(1500 * size) + 1)}
    return _structured(
        aim, {"type": "object", "properties": names, "additionalProperties": draw.random() < 0.5}
    )


def patterns(aim: Aim, draw: random.Random, size: float) -> Body:
    parts = ["a{1,900}", "(a|b|c)*", "[a-z]+", ".*x", "(?:ab?){2,40}", "\\d{3}", '[^"]{0,200}']
    pattern = "".join(draw.choice(parts) for _ in range(int(60 * size) + 1))
    names = {f"p{i}": {"type": "string", "pattern": pattern[i:]} for i in range(draw.randint(1, 8))}
    return _structured(aim, {"type": "object", "properties": names})


def choices(aim: Aim, draw: random.Random, size: float) -> Body:
    one = {"anyOf": [{"properties": {f"k{i}": {"const": draw.random()}}} for i in range(int(90 * size) + 1)]}
    return _structured(aim, {draw.choice(["allOf", "oneOf", "anyOf"]): [one] * draw.randint(1, 8)})


def raw_json(aim: Aim, draw: random.Random, size: float) -> Body:
    unit = draw.choice([b'"",', b"[", b'{"a":', b"[[],", b"0,", b'"\\u0000",', b'{"a":1},', b"1e9,"])
    head = draw.choice([b"", b'{"messages":[', b'{"prompt":[', b'{"tools":[', b'{"model":['])
    return draw.choice([CHAT, COMPLETIONS, "/tokenize"]), head + unit * int(BODY_BYTES * size / len(unit))


def tools(aim: Aim, draw: random.Random, size: float) -> Body:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * int(900 * size)}}
    message = {"role": "assistant", "content": None, "tool_calls": [call] * draw.randint(1, 100)}
    return _chat(aim, messages=[message])


def messages(aim: Aim, draw: random.Random, size: float) -> Body:
    parts = [{"type": "text", "text": draw.choice(["", "a", " \n"])}] * draw.randint(1, 200)
    message = {"role": draw.choice(["user", "assistant", "system", "developer"]), "content": parts}
    return _chat(aim, messages=[message] * (int(2047 * size) + 1))


def tokenize(aim: Aim, draw: random.Random, size: float) -> Body:
    text = draw.choice(["größer ", "a b ", "x", " ", "\n", "👩‍👩‍👧", "1", "'s"])
    length = draw.choice([BODY_BYTES, 4 * aim.context, 40 * aim.context])
    prompt = text * int(size * length / len(text.encode()))
    return "/tokenize", json.dumps({"prompt": prompt, "return_token_strs": True}, ensure_ascii=False).encode()


def detokenize(aim: Aim, draw: random.Random, size: float) -> Body:
    count = draw.choice([aim.context, 1_000_000])
    return "/detokenize", json.dumps({"tokens": [draw.randrange(200)] * int(count * size)}).encode()


def sequences(aim: Aim, draw: random.Random, size: float) -> Body:
    length = int((aim.context - 8) * size) + 1
    prompts = [[draw.randrange(4, 200)] * length for _ in range(8)]
    return _completion(aim, prompt=prompts, n=8, stream=draw.random() < 0.5, max_tokens=2)


def alternatives(aim: Aim, draw: random.Random, size: float) -> Body:
    length = {"max_tokens": int(200 * size) + 1, "ignore_eos": True}
    scores = {"logprobs": True, "top_logprobs": 20}
    return _chat(aim, n=8, stream=draw.random() < 0.5, **length, **scores)


def crowds(aim: Aim, draw: random.Random, size: float) -> Body:
    """64 sequences, the most that one request may have."""
    prompts = [[draw.randrange(4, 200) for _ in range(8)] for _ in range(int(7 * size) + 1)]
    fields = {"stream": draw.random() < 0.5, "max_tokens": 100, "ignore_eos": True}
    return _completion(aim, prompt=prompts, n=8, logprobs=5, **fields)


def silent(aim: Aim, draw: random.Random, size: float) -> Body:
    """Tokens without text, forced one after the other; each comes with 20 alternatives."""
    forced = {"logit_bias": {str(draw.randrange(4)): 100}, "ignore_eos": True}
    scores = {"logprobs": True, "top_logprobs": 20}
    length = {"max_tokens": int(min(2000, aim.context - 64) * size) + 1}
    return _chat(aim, n=8, stream=draw.random() < 0.5, **forced, **scores, **length)


def echoes(aim: Aim, draw: random.Random, size: float) -> Body:
    length = int((aim.context - 8) * size) + 1
    prompts = [[draw.randrange(4, 200)] * length for _ in range(4)]
    return _completion(aim, prompt=prompts, n=2, echo=True, logprobs=5, stream=draw.random() < 0.5)


def words(aim: Aim, draw: random.Random, size: float) -> Body:
    bias = {str(draw.randrange(200)): draw.uniform(-100, 100) for _ in range(int(1024 * size))}
    stops = ["".join(draw.choice("ab ") for _ in range(256)) for _ in range(4)]
    return _completion(aim, prompt="a b " * int(aim.context * size / 4), logit_bias=bias, stop=stops)


def unknown_names(aim: Aim, draw: random.Random, size: float) -> Body:
    """A text of megabytes where a refusal quotes the client: the name of a field, or a value that is no choice."""
    text = draw.choice(["k", "\u00df", "\n"]) * int(BODY_BYTES * size / 6)
    return (
        _chat(aim, **{text: 1})
        if draw.random() < 0.5
        else _chat(aim, messages=[{"role": text, "content": ""}])
    )


def batch_requests(aim: Aim, draw: random.Random, size: float) -> Body:
    """Requests for a batch, as large as any body may be."""
    names = {draw.choice(["a", f"{i}"]): "" for i in range(int(BODY_BYTES * size / 12))}
    endpoint = "/" * int(BODY_BYTES * size / 2)
    asked = {"input_file_id": "file-0", "completion_window": "24h", "endpoint": COMPLETIONS}
    return "/v1/batches", json.dumps(
        asked | draw.choice([{"metadata": names}, {"endpoint": endpoint}])
    ).encode()


KINDS: tuple[Make, ...] = (
    unknown_names, batch_requests, brackets, properties, patterns, choices, raw_json, tools, messages, tokenize,
    detokenize, sequences, alternatives, crowds, silent, echoes, words,
)  # fmt: skip


def bodies(aim: Aim, count: int, seed: int) -> Iterator[Body]:
    """Each kind at its bound, then `count` random ones; half of these are at their bound, too."""
    draw = random.Random(seed)
    for make in KINDS:
        yield make(aim, draw, 1.0)
    for unit in (b'"",', b"[", b'{"a":', b"[[],"):
        yield CHAT, unit * (BODY_BYTES // len(unit))
    for _ in range(count):
        yield draw.choice(KINDS)(aim, draw, 1.0 if draw.random() < 0.5 else draw.random())


async def refusal(port: int, head: bytes) -> str:
    """The status that a head without a key gets; "" for none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n\r\n")
        async with asyncio.timeout(ANSWER_S):
            return (await reader.readline())[9:12].decode()
    finally:
        writer.transport.abort()


async def send(
    target: HostileTarget, coming: Iterator[Body], concurrency: int, least_s: float
) -> dict[str, Any]:
    """Send all; statuses by path, how many got no answer that is complete, and the outcomes of all other clients."""
    port, key = target.port, target.key
    statuses: Counter[str] = Counter()
    unanswered: Counter[str] = Counter()
    begun_s = time.monotonic()

    async def client() -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S) as http:
            for path, content in coming:
                headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
                try:
                    answer = await http.post(path, content=content, headers=headers)
                    statuses[f"{path} {answer.status_code}"] += 1
                except NO_ANSWER as error:
                    unanswered[f"{path} {type(error).__name__}: {error}"] += 1

    async def stranger() -> None:
        for head in HEADS * HEAD_ROUNDS:
            try:
                statuses[f"head {await refusal(port, head)}"] += 1
            except OSError as error:  # refused before all of it was sent
                unanswered[f"head {type(error).__name__}"] += 1

    others = [asyncio.create_task(runs(target)) for runs in HOSTILE_CLIENTS]
    await asyncio.gather(*(sends() for sends in (client, stranger) for _ in range(concurrency)))
    await asyncio.sleep(max(0.0, begun_s + least_s - time.monotonic()))
    for task in others:
        task.cancel()
    broken = [
        str(one)
        for one in await asyncio.gather(*others, return_exceptions=True)
        if isinstance(one, Exception)
    ]
    return {
        "statuses": dict(sorted(statuses.items())),
        "unanswered": dict(unanswered),
        "clients": dict(sorted(target.outcomes.items())),
        "broken_clients": broken,
        "took_s": round(time.monotonic() - begun_s, 1),
    }


def main() -> None:
    """Send and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("context", type=int)
    parser.add_argument("key", help="API key")
    parser.add_argument("--bodies", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the clients go on at least")
    options = parser.parse_args()
    os.nice(5)  # somebody else's machine, as far as that can be had here
    coming = bodies(Aim(options.model, options.context), options.bodies, options.seed)
    target = HostileTarget(options.port, options.model, options.context, options.key)
    print(json.dumps(uvloop.run(send(target, coming, options.concurrency, options.seconds))))


if __name__ == "__main__":
    main()
