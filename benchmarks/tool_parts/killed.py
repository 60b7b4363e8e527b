"""Streams within calls and thoughts whose decode worker is killed: they go on, with the same tokens and events."""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.tool_parts.thinking_tiny import FLAGS, write_thinking_model
from tests.support.deployment import Served, serve_parts, wait_for

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
# As long as an answer is cut in its middle.
CODE = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": "^([a-f0-9]{4}-){40}[a-f0-9]{4}$"}},
    "required": ["code"],
    "additionalProperties": False,
}
FUNCTION = {"name": "write", "parameters": CODE}
TEXT = "Write a long file of Python."
HI = [{"role": "user", "content": TEXT}]
NEW_TOKENS, ANSWER_S = 300, 600.0
# A stream is within its call or thought once it has so many pieces of it.
BEGUN = 4


@dataclass(frozen=True)
class Way:
    """A way of asking, and the part of its answer, "call" or "thought", within which its worker is killed."""

    within: str
    path: str
    body: dict[str, Any]


def chat_way(within: str, **more: Any) -> Way:
    """A chat, with log-probabilities, which name its tokens."""
    body = {
        "messages": HI,
        "max_tokens": NEW_TOKENS,
        "logprobs": True,
        "stream_options": {"include_usage": True},
    }
    return Way(within, CHAT, body | more)  # fmt: skip


TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "write"}}
WAYS: dict[str, Way] = {
    "a call": chat_way("call", tools=TOOLS, tool_choice="required", thinking_token_budget=6),
    "a named call": chat_way("call", tools=TOOLS, tool_choice=NAMED, thinking_token_budget=3),
    "a thought": chat_way("thought", ignore_eos=True),
    "a thought that its budget ends": chat_way("thought", ignore_eos=True, thinking_token_budget=150),
    "a call of Messages": Way(
        "call",
        MESSAGES,
        {
            "messages": HI,
            "max_tokens": NEW_TOKENS,
            "tools": [{"name": "write", "input_schema": CODE}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled", "budget_tokens": 6},
        },
    ),
    "a thought of Responses": Way(
        "thought", RESPONSES, {"input": TEXT, "max_output_tokens": NEW_TOKENS, "ignore_eos": True}
    ),
}


@dataclass
class StreamedAnswer:
    """What came of a stream: its events, where those that only continue one are joined with it, and its tokens."""

    id: str = ""
    events: list[list[Any]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    usage: Any = None
    # Pieces of calls and of thoughts.
    pieces: Counter[str] = field(default_factory=Counter)

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Take in an event of any of the routes."""
        if "choices" in event:
            self._add_chunk(event)
            return
        kind = event.get("type", "error")
        if kind == "ping":
            return
        made = event.get("message") or event.get("response") or {}
        self.id = made.get("id", self.id)
        self.usage = made.get("usage") or event.get("usage") or self.usage
        delta = event.get("delta")
        where = event.get("index", event.get("output_index"))
        if isinstance(delta, str):
            self._add_piece(f"{kind} {where}", delta)
        elif isinstance(delta, dict) and "type" in delta:
            # A signature is a digest of what came before, so it is compared, too.
            text = next(value for key, value in delta.items() if key != "type")
            self._add_piece(f"{delta['type']} {where}", text)
        else:
            self.events.append([kind, where, event.get("error") or delta])

    def _add_chunk(self, event: Mapping[str, Any]) -> None:
        self.id, self.usage = event["id"], event.get("usage") or self.usage
        for choice in event["choices"]:
            delta = choice["delta"]
            for kind in ("reasoning", "content"):
                if delta.get(kind):
                    self._add_piece(kind, delta[kind])
            for call in delta.get("tool_calls") or ():
                if "id" in call:
                    self.events.append(["call", call["index"], call["function"]["name"]])
                if text := call["function"].get("arguments"):
                    self._add_piece(f"arguments {call['index']}", text)
            self.tokens += [entry["token"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
            if choice["finish_reason"]:
                self.events.append(["finish", choice["finish_reason"], choice.get("stop_reason")])

    def _add_piece(self, kind: str, text: str) -> None:
        self.pieces[find_part(kind)] += 1
        if self.events and self.events[-1][0] == kind:
            self.events[-1][1] += text
        else:
            self.events.append([kind, text])

    def said(self) -> tuple[Any, ...]:
        """What must be the same when it is asked again, when more of its prompt is cached."""
        usage = {key: value for key, value in (self.usage or {}).items() if isinstance(value, int)}
        if "cache_read_input_tokens" in usage:
            # Of Messages, which counts apart what was cached.
            usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        return self.events, self.tokens, usage


def find_part(kind: str) -> str:
    """The part of an answer that a kind of piece belongs to: "call", "thought" or "text"."""
    if "arguments" in kind or "input_json" in kind:
        return "call"
    return "thought" if "reason" in kind or "thinking" in kind else "text"


async def ask_once(
    client: httpx.AsyncClient, way: Way, seed: int, begun: asyncio.Event | None = None
) -> StreamedAnswer:
    """A stream to its end; `begun` is set when it is in the middle of its call or thought, or over.

    Raises:
        RuntimeError: it is refused.
    """
    answer = StreamedAnswer()
    body = {"model": "tiny", "stream": True, "temperature": 0.9, "seed": seed, **way.body}
    try:
        async with client.stream("POST", way.path, json=body) as reply:
            if reply.status_code != 200:
                raise RuntimeError((await reply.aread()).decode()[:400])
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    answer.add_event(json.loads(line[6:]))
                    if begun is not None and answer.pieces[way.within] >= BEGUN:
                        begun.set()
    finally:
        if begun is not None:
            begun.set()
    return answer


async def ask_undisturbed(url: str, seeds: Iterable[int]) -> dict[tuple[str, int], StreamedAnswer]:
    """All ways with each seed, at once."""
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, trust_env=False) as client:
        asked = [(name, seed) for seed in seeds for name in WAYS]
        answers = await asyncio.gather(*(ask_once(client, WAYS[name], seed) for name, seed in asked))
    return dict(zip(asked, answers, strict=True))


async def ask_and_kill(
    served: Served, seed: int, victims: Sequence[psutil.Process]
) -> dict[str, StreamedAnswer]:
    """All ways at once; when each is within its call or thought, the workers `victims` are killed."""
    begun = {name: asyncio.Event() for name in WAYS}
    async with httpx.AsyncClient(base_url=served.url, timeout=ANSWER_S, trust_env=False) as client:
        tasks = {
            name: asyncio.create_task(ask_once(client, way, seed, begun[name])) for name, way in WAYS.items()
        }
        await asyncio.gather(*(event.wait() for event in begun.values()))
        for process in victims:
            process.kill()
        return {name: await task for name, task in tasks.items()}


def read_moved(log: Path) -> set[str]:
    """The answers that went on elsewhere after they had begun, by the log of requests."""
    # A line that is being written is left out.
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").split("\n")[:-1]]
    return {event["request"] for event in events if event["event"] == "retried" and event["delivered"] > 1}


def measure_kills(kills: int) -> dict[str, Any]:
    """Kill so many decode workers amid streams, and compare with undisturbed ones of the same seeds.

    Raises:
        RuntimeError: a stream is refused.
    """
    moved, differing = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="diptych-tools-") as name:
        folder, log = Path(name) / "model", Path(name) / "requests.jsonl"
        write_thinking_model(folder)
        flags = ("--model", str(folder), "--served-model-name", "tiny", "--request-log", str(log), *FLAGS)
        with serve_parts("--prefill", "1", "--decode", "2", "--recovery-s", "300", *flags) as served:
            rounds = plan_rounds(kills)
            undisturbed = asyncio.run(ask_undisturbed(served.url, range(len(rounds))))
            for number, names in enumerate(rounds):
                victims = [served.worker(one) for one in names]
                answers = asyncio.run(ask_and_kill(served, number, victims))
                wait_for(functools.partial(_are_back, served, {victim.pid for victim in victims}))
                gone = read_moved(log)
                for way, answer in answers.items():
                    is_moved = answer.id in gone
                    moved[WAYS[way].within] += is_moved
                    is_same = answer.said() == undisturbed[way, number].said()
                    differing += [] if is_same else [f"{way}, seed {number}, moved: {is_moved}"]
    total = moved.total()
    return {
        "migrated_equal": round(1 - len(differing) / total, 4) if total else 0.0,
        "kills": kills,
        "migrated_calls": moved["call"],
        "migrated_thoughts": moved["thought"],
        "differing": differing,
    }


def plan_rounds(kills: int) -> list[list[str]]:
    """The workers that are killed in each round, `kills` in all: one, so that its answers go on at once on the other
    one, and then both, so that all answers wait for a new one.
    """
    rounds: list[list[str]] = []
    while (left := kills - sum(map(len, rounds))) > 0:
        both = ["decode-0", "decode-1"]
        rounds.append(both if len(rounds) % 2 and left > 1 else [both[len(rounds) // 2 % 2]])
    return rounds


def _are_back(served: Served, gone: set[int]) -> bool:
    """Whether other processes have taken the places of killed workers."""
    pids = {one["pid"] for one in served.status()["workers"]}
    return served.ready() and len(pids) == 3 and pids.isdisjoint(gone)
