"""kill -9 of decode workers in the middle of answers, over HTTP, on the embedded model: the answers do not show it.

Every way of asking is answered once undisturbed, and then while one decode worker dies, and while both do, so that
everybody waits for their restart. Text, tokens, finish, log-probabilities and usage have to be the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.deployment import Served, serve_parts, wait_for

pytestmark = pytest.mark.timeout(900)

TOKENS = 160
LONG = 100
ROUNDS = 6  # of killing; two or three are usually enough for every way of asking to be cut in the middle
TEXT = "def read(self, size=-1):\n    return self.buffer.read(size)\n\n"
BEGUN = 3  # pieces: a stream that is killed at its first was not yet decoding, and is not cut in the middle
LATER = 12  # pieces more, each time those that were not cut are asked again: a scored prompt begins after the others
LOGPROB_ERROR = 2e-3  # KV that was read again is summed up in another order
MANY_BYTES = {"type": "string", "pattern": "^[😀🎉é漢字]{80}$"}
HEX = {"type": "string", "pattern": "^([a-f0-9]{4}-){60}[a-f0-9]{4}$"}
# Its arguments are long, so that workers die amid them.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {"code": HEX},
                "required": ["code"],
                "additionalProperties": False,
            },
        },
    }
]
LIST = {
    "type": "object",
    "properties": {"names": {"type": "array", "minItems": 40, "items": {"type": "string", "maxLength": 6}}},
    "required": ["names"],
    "additionalProperties": False,
}


def schema(content: dict[str, Any]) -> dict[str, Any]:
    """A `response_format` of this JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": content, "strict": True}}


def long(**more: Any) -> dict[str, Any]:
    return {"prompt": TEXT * 6, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **more}


def chat(**more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Write a long file of Python."}
    return {"messages": [message], "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **more}


WARM = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": long(),
    "seeded": long(**WARM),
    "penalties": long(**WARM, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.1),
    "top_k and min_p": long(temperature=1.1, top_k=40, min_p=0.02, seed=5),
    "logit_bias": long(**WARM, logit_bias={"300": 2.5, "11": -100.0}),
    "n": long(**WARM, n=2),
    "logprobs": long(logprobs=3),
    "min_tokens": long(**WARM, min_tokens=TOKENS - 5, ignore_eos=False),
    "stop": long(stop=["no such text in any answer", "\t\t\t\t\t\t"]),
    "json_schema": long(**WARM, response_format=schema(LIST), ignore_eos=False),
    "regex": long(**WARM, response_format=schema(HEX), ignore_eos=False),
    "many bytes": long(**WARM, response_format=schema(MANY_BYTES), ignore_eos=False, max_tokens=400),
    "named tokens": long(
        **WARM, allowed_token_ids=list(range(200, 700)), bad_words=["self", "the", "in the"]
    ),
    "token ids": long(**WARM, return_token_ids=True),
    "a choice": long(**WARM, structured_outputs={"regex": "([a-f0-9]{4}-){60}[a-f0-9]{4}"}, ignore_eos=False),
    "whole, with its prompt": long(**WARM, stream=False, prompt_logprobs=2, bad_words=["def"]),
    "chat": chat(),
    "chat with logprobs": chat(**WARM, logprobs=True, top_logprobs=2),
    "chat with json_object": chat(**WARM, response_format={"type": "json_object"}, ignore_eos=False),
    # The bias makes calls begin amid the text of some answers.
    "a call": chat(**WARM, tools=TOOLS, tool_choice="required", ignore_eos=False, logprobs=True),
    "calls in auto": chat(**WARM, tools=TOOLS, logit_bias={"4": 7.0}, min_tokens=TOKENS - 5, logprobs=True),
    "whole call": chat(**WARM, tools=TOOLS, tool_choice="required", ignore_eos=False, stream=False),
    "whole": long(**WARM, stream=False, user="whole"),
    "whole chat": chat(stream=False, frequency_penalty=0.3),
    # Answers of many lengths, so that some have one token left, and some end with the stop string that is being cut.
    **{f"of {n} tokens": long(max_tokens=n, prompt=TEXT * 2) for n in range(24, 120, 12)},
}
MARKS = ("greedy", "n")  # long streams that are asked beside what is left to be cut


@dataclass
class Choice:
    """What was received of one choice."""

    text: str = ""
    finish: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def add(self, answer: dict[str, Any]) -> None:
        """Take in a choice of an answer, or of an event."""
        content = answer.get("message") or answer.get("delta") or {}
        self.text += (answer.get("text") or "") + (content.get("content") or "")
        for call in content.get("tool_calls") or []:
            # Ids differ from request to request.
            self.text += f"[{call['function'].get('name', '')}]" * ("id" in call)
            self.text += call["function"]["arguments"]
        self.finish = answer.get("finish_reason") or self.finish
        self.ids += answer.get("token_ids") or []
        if (logprobs := answer.get("logprobs")) is not None:
            entries = logprobs.get("content") or []
            self.tokens += logprobs.get("tokens") or [entry["token"] for entry in entries]
            self.logprobs += logprobs.get("token_logprobs") or [entry["logprob"] for entry in entries]


@dataclass
class StreamedAnswer:
    """A whole answer. `errors` are what a client would raise."""

    name: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)
    errors: list[Any] = field(default_factory=list)
    done: bool = False  # it came to its proper end

    def add(self, body: dict[str, Any]) -> None:
        self.name = body.get("id", self.name)
        if "error" in body:
            self.errors.append(body["error"])
        for choice in body.get("choices", []):
            self.choices.setdefault(choice["index"], Choice()).add(choice)
        if usage := body.get("usage"):
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]


async def ask(
    client: httpx.AsyncClient, body: dict[str, Any], answer: StreamedAnswer, begun: asyncio.Event, enough: int
) -> None:
    """One request to its end; `begun` is set after `enough` pieces of its answer, or when it is over."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = {"model": "tiny", "stream": True, **body}
    if not body["stream"]:
        reply = await client.post(path, json=body)
        answer.add(reply.json())
        answer.done = reply.status_code == 200
        return
    body["stream_options"] = {"include_usage": True}
    pieces = 0
    async with client.stream("POST", path, json=body) as reply:
        if reply.status_code != 200:
            answer.errors.append(await reply.aread())
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                answer.done = True
            elif line.startswith("data: "):
                answer.add(json.loads(line.removeprefix("data: ")))
                pieces += any(choice.text for choice in answer.choices.values())
                if pieces == enough:
                    begun.set()
    begun.set()


async def ask_all(
    served: Served, victims: Sequence[psutil.Process], ways: Collection[str] = WAYS, enough: int = BEGUN
) -> dict[str, StreamedAnswer]:
    """These ways of asking at once; when every stream has had `enough` pieces, `victims` are killed."""
    answers = {name: StreamedAnswer() for name in ways}
    begun = {name: asyncio.Event() for name in ways if WAYS[name].get("stream", True)}
    async with httpx.AsyncClient(base_url=served.url, timeout=600, trust_env=False) as client:
        tasks = [
            asyncio.create_task(
                ask(client, WAYS[name], answers[name], begun.get(name, asyncio.Event()), enough)
            )
            for name in ways
        ]
        if victims:
            await asyncio.gather(*(event.wait() for event in begun.values()))
            for worker in victims:
                worker.kill()
        await asyncio.gather(*tasks)
    return answers


class Deployment:
    """Two prefill and two decode workers, the undisturbed answers, and the log of what became of requests."""

    def __init__(self, served: Served, log: Path) -> None:
        self.served, self.log = served, log
        self.undisturbed = asyncio.run(ask_all(served, ()))
        # Shorter ones may be over when the last of all has begun.
        self.long = {name for name, answer in self.undisturbed.items() if answer.usage[1] >= LONG}

    def cut(self, answers: dict[str, StreamedAnswer]) -> set[str]:
        """The ways of asking whose answer went on elsewhere after it had begun."""
        ids = {answer.name: name for name, answer in answers.items()}
        moved = [e["request"] for e in self.events() if e["event"] == "retried" and e["delivered"] > 1]
        return {ids[own] for name in moved for own in ids if name.partition(".")[0] == own}

    def events(self) -> list[dict[str, Any]]:
        """What the log has by now; a line that is being written is left out."""
        lines = self.log.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def rest(self, dead: Sequence[psutil.Process] = ()) -> None:
        """Everybody is back, those who were killed too, and nothing is held."""
        gone = {process.pid for process in dead}

        def back() -> bool:
            pids = {worker["pid"] for worker in self.served.status()["workers"]}
            return self.served.ready() and len(pids) == 4 and pids.isdisjoint(gone)

        wait_for(back)
        wait_for(lambda: self.served.held() == {})


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    pools = ("--prefill", "2", "--decode", "2")
    with serve_parts(*pools, "--recovery-s", "300", "--request-log", str(log)) as served:
        yield Deployment(served, log)


def compare(undisturbed: StreamedAnswer, answer: StreamedAnswer) -> None:
    """The same answer, and counted once."""
    assert answer.done and not answer.errors, answer.errors
    assert answer.usage == undisturbed.usage
    for index, choice in undisturbed.choices.items():
        other = answer.choices[index]
        assert (other.text, other.finish, other.tokens) == (choice.text, choice.finish, choice.tokens)
        assert other.ids == choice.ids
        assert other.logprobs == pytest.approx(choice.logprobs, abs=LOGPROB_ERROR)


def test_the_ways_of_asking_are_what_they_say(deployment: Deployment) -> None:
    """Long enough to be cut, with characters of many bytes, several choices, and log-probabilities."""
    answers = deployment.undisturbed
    for answer in answers.values():
        assert answer.done and not answer.errors, answer.errors
    assert answers["greedy"].usage[1] == TOKENS and answers["n"].usage[1] == 2 * TOKENS
    assert len(answers["logprobs"].choices[0].logprobs) == TOKENS
    assert set("😀🎉é漢字") & set(answers["many bytes"].choices[0].text)
    assert len(deployment.long) >= 12 and {"many bytes", "regex", "json_schema", "n"} <= deployment.long


def test_answers_go_on_to_the_last_token_when_decode_workers_are_killed(deployment: Deployment) -> None:
    served, cut = deployment.served, set[str]()
    victims: list[psutil.Process] = []
    for number in range(ROUNDS):
        names = ("decode-0",) if number == 0 else ("decode-0", "decode-1")
        deployment.rest(victims)
        # Looked up before anything is asked: a busy gateway takes longer to answer than a stream to end.
        victims = [served.worker(name) for name in names]
        # After two rounds of all, what was not cut is asked again, beside streams that tell when to kill: among few,
        # nobody is done before the last has begun.
        ways = WAYS if number < 2 else [*MARKS, *(deployment.long - cut - set(MARKS))]
        answers = asyncio.run(ask_all(served, victims, ways, BEGUN + LATER * max(0, number - 1)))
        for name, answer in answers.items():
            try:
                compare(deployment.undisturbed[name], answer)
            except AssertionError as error:
                raise AssertionError(f"{name}, when {' and '.join(names)} died: {error}") from error
        cut |= deployment.cut(answers)
        print(f"{' and '.join(names)}: {len(cut)} of {len(WAYS)} ways of asking were cut by now")
        if number and cut >= deployment.long:
            break
    assert cut >= deployment.long, f"never cut in the middle: {deployment.long - cut}"
    assert served.metric("diptych:migrated_streams_total") >= len(cut)


def test_nothing_is_left_behind(deployment: Deployment) -> None:
    deployment.rest()

    def named(kind: str) -> list[str]:
        return sorted(event["request"] for event in deployment.events() if event["event"] == kind)

    wait_for(lambda: len(named("end")) >= len(set(named("arrive"))))  # the log is a moment late
    assert named("end") == sorted(set(named("arrive"))), "one end for each"
