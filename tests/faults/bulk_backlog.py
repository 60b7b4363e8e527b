"""A backlog of batches beside a scenario's requests, and the laws of their lines.

    upload ──▶ batch, batch, … (two are always open) ──▶ finish: results, rest

B1 each line has exactly one result, whole and in one file   B3 answers are those of HTTP requests
B2 answers are the oracle's, token by token                  B4 after the last line nothing is held for bulk work
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx

from tests.faults.client import ClientRequest
from tests.faults.fault_deployment import FaultDeployment
from tests.faults.inject import holds_in_time
from tests.faults.workload import RequestBook

CHAT: Final = "/v1/chat/completions"
COMPLETION: Final = "/v1/completions"
# Kinds of sampling of chats; the others are asked for differently than in completions.
CHAT_KINDS = ("greedy", "seeded", "penalised", "biased", "ending", "structured")
MAX_OPEN = 2
LOOK_S, CALL_TIMEOUT_S = 0.4, 30.0
# For all batches to end once no fault is left, and for the books to be empty after the last.
END_S, REST_S = 120.0, 30.0
# One line in so many is malformed.
BAD_EVERY = 10
# Lines of each kind that are also asked over HTTP.
SPOT_CHECKS = 8
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
BATCH_BOOKS = ("slabs_lent", "bulk_running", "bulk_waiting")
FAILURES = (httpx.HTTPError, ValueError)


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line, and what it means; `ask` is None if it is malformed."""

    custom_id: str
    body: Mapping[str, Any]
    ask: ClientRequest | None


class LineBook:
    """The lines of the two kinds of batches, and their answers. Everything follows from the seed."""

    def __init__(self, seed: int, codec: str, num_lines: int) -> None:
        """`codec` is that of the deployment's KV, `num_lines` how many lines a batch has."""
        self._book = RequestBook(seed, codec)
        makers = {CHAT: self._chat, COMPLETION: self._completion}
        self.lines = {
            url: {line.custom_id: line for line in (make(number) for number in range(num_lines))}
            for url, make in makers.items()
        }

    def _completion(self, number: int) -> BatchLine:
        ask = self._book.ask(prompt=(8, 200), answer=30)
        body = {name: value for name, value in ask.body().items() if not name.startswith("stream")}
        return self._line(f"text-{number}", number, body, ask)

    def _chat(self, number: int) -> BatchLine:
        kind = CHAT_KINDS[number % len(CHAT_KINDS)]
        ask = self._book.ask(prompt=(8, 200), answer=30, kind=kind)
        text = "".join(chr(self._book.dice.randrange(33, 127)) for _ in ask.prompt)
        ask = replace(ask, prompt=[1 + byte for byte in text.encode()])
        body = {name: value for name, value in ask.body().items() if not name.startswith("stream")}
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": text}]
        return self._line(f"chat-{number}", number, body, ask)

    def _line(self, custom_id: str, number: int, body: dict[str, Any], ask: ClientRequest) -> BatchLine:
        if number % BAD_EVERY == BAD_EVERY - 1:
            return BatchLine(f"bad-{custom_id}", body | {"max_tokens": -1}, None)
        return BatchLine(custom_id, body, ask)

    def content(self, url: str) -> bytes:
        """The input file of a kind."""
        rows = [
            {"custom_id": line.custom_id, "method": "POST", "url": url, "body": line.body}
            for line in self.lines[url].values()
        ]
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)

    def wrong(self, line: BatchLine, status: int, body: Mapping[str, Any]) -> str:
        """What is not as it should be in an answer to a line; "" if nothing is."""
        if line.ask is None:
            return "" if status == 400 and "error" in body else f"{status} {body} to a malformed line"
        if status != 200:
            return f"{status} {body}"
        expected = self._book.expected(line.ask)
        [(text, finish)], usage = essence(body)
        if (text, finish) != (expected.text, expected.finish):
            return f"{text!r} ({finish}) instead of {expected.text!r} ({expected.finish})"
        counted = (len(line.ask.prompt), expected.completion_tokens)
        return "" if usage == counted else f"usage {usage}, not {counted}"


def essence(body: Mapping[str, Any]) -> tuple[list[tuple[str, str]], tuple[int, int]]:
    """What must be equal in two answers to the same body: texts with finish reasons, and tokens."""
    choices = [
        (one["text"] if "text" in one else one["message"]["content"], one["finish_reason"])
        for one in body["choices"]
    ]
    return choices, (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])


class BulkBacklog:
    """Keeps batches open in a thread of its own, whatever happens to the deployment."""

    def __init__(self, fleet: FaultDeployment, seed: int) -> None:
        self._fleet = fleet
        self.book = LineBook(seed, fleet.shape.codec, fleet.shape.bulk_lines)
        once = httpx.Limits(max_keepalive_connections=0)
        url = f"http://127.0.0.1:{fleet.port}"
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=CALL_TIMEOUT_S, limits=once)
        self._inputs: dict[str, str] = {}
        # Batches whose creation was acknowledged.
        self.made: list[str] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._feed, name="backlog", daemon=True)

    def start(self) -> None:
        """Upload the input files, and begin. Returns when bulk work is being done."""
        for url in self.book.lines:
            answer = self._http.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", self.book.content(url))}
            )
            self._inputs[url] = answer.raise_for_status().json()["id"]
        self._thread.start()
        self._fleet.until(lambda: self._fleet.status()["batches"]["lines"]["running"] > 0)

    def _feed(self) -> None:
        while not self._ending.wait(LOOK_S):
            with contextlib.suppress(*FAILURES):  # the gateway is away
                if sum(batch["status"] not in ENDED for batch in self._list()) < MAX_OPEN:
                    self._create(tuple(self._inputs)[len(self.made) % len(self._inputs)])

    def _create(self, url: str) -> None:
        asked = {"input_file_id": self._inputs[url], "endpoint": url, "completion_window": "24h"}
        self.made.append(self._http.post("/v1/batches", json=asked).raise_for_status().json()["id"])

    def _list(self) -> list[dict[str, Any]]:
        """All batches, those included whose creation was not acknowledged."""
        found: list[dict[str, Any]] = []
        while True:
            after = {"after": found[-1]["id"]} if found else {}
            page = self._http.get("/v1/batches", params={"limit": 100} | after).raise_for_status().json()
            found += page["data"]
            if not page["has_more"]:
                return found

    # ---- the end

    def finish(self) -> tuple[list[str], dict[str, float]]:
        """Let all batches end; returns the laws that were broken, and figures."""
        self._ending.set()
        self._thread.join()
        # From here on nothing is wrong with the gateway.
        ended = holds_in_time(lambda: all(one["status"] in ENDED for one in self._list()), END_S)
        batches = self._list()
        stats = [worker["stats"] for worker in self._fleet.status()["workers"]]
        figures = {
            "batches": float(len(batches)),
            "bulk_lines": float(sum(one["request_counts"]["completed"] for one in batches)),
            "bulk_preempted": float(sum(one["bulk_preemptions"] for one in stats)),
        }
        broken = [] if ended else [f"B1 batches did not end in {END_S} s: {self._fleet.status()['batches']}"]
        if lost := set(self.made) - {one["id"] for one in batches}:
            broken.append(f"B1 batches are lost: {sorted(lost)}")
        for batch in batches:
            broken += [f"{what} ({batch['id']})" for what in self._check_batch(batch)]
        broken += self._check_like_http()
        if not holds_in_time(lambda: not bulk_held(self._fleet.status()), REST_S):
            broken.append(f"B4 something is held for ever: {bulk_held(self._fleet.status())}")
        return broken, figures

    def close(self) -> None:
        """Make no more batches, and end. Idempotent."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        self._http.close()

    def _check_batch(self, batch: Mapping[str, Any]) -> list[str]:
        if batch["status"] not in ENDED:
            return []
        lines = self.book.lines[batch["endpoint"]]
        files = {name: self._read(batch[f"{name}_file_id"]) for name in ("output", "error")}
        broken = check_results(self.book, lines, files)
        counts, bad = batch["request_counts"], sum(line.ask is None for line in lines.values())
        wanted = {"total": len(lines), "completed": len(lines) - bad, "failed": bad}
        if batch["status"] != "completed" or counts != wanted:
            broken.append(f"B1 a batch is {batch['status']} with {counts}")
        return broken

    def _read(self, file: str | None) -> bytes:
        if file is None:
            return b""
        return self._http.get(f"/v1/files/{file}/content").raise_for_status().content

    def _check_like_http(self) -> list[str]:
        """B3, for some lines of each kind. That lines are the oracle's is B2, so these are, too."""
        broken = []
        for url, lines in self.book.lines.items():
            for line in list(lines.values())[-SPOT_CHECKS:]:
                answer = self._http.post(url, json=line.body)
                if wrong := self.book.wrong(line, answer.status_code, answer.json()):
                    broken.append(f"B3 {line.custom_id} over HTTP: {wrong}")
        return broken


def check_results(book: LineBook, lines: Mapping[str, BatchLine], files: Mapping[str, bytes]) -> list[str]:
    """B1 and B2 for the contents of a batch's files, "output" and "error"."""
    broken, seen, ids = [], list[str](), list[str]()
    for name, content in files.items():
        if content and not content.endswith(b"\n"):
            broken.append(f"B1 the {name} file is torn: …{content[-60:]!r}")
        for row in content.splitlines():
            try:
                result = json.loads(row)
            except ValueError:
                broken.append(f"B1 a line of the {name} file is torn: {row[:60]!r}…")
                continue
            custom_id, response = result["custom_id"], result.get("response") or {}
            seen.append(custom_id)
            ids.append(result["id"])
            line = lines.get(custom_id)
            if line is None:
                continue
            if (line.ask is None) != (name == "error"):
                broken.append(f"B1 {custom_id} is in the {name} file: {response or result.get('error')}")
            elif wrong := book.wrong(line, response["status_code"], response["body"]):
                broken.append(f"B2 {custom_id}: {wrong}")
    broken += _check_names(lines, seen)
    if len({*ids}) != len(ids):
        broken.append("B1 two results have the same id")
    return broken


def _check_names(lines: Iterable[str], seen: list[str]) -> list[str]:
    missing, foreign = sorted({*lines} - {*seen}), sorted({*seen} - {*lines})
    doubled = sorted({name for name in seen if seen.count(name) > 1})
    parts = {"without a result": missing, "with two results": doubled, "that were never asked": foreign}
    return [f"B1 lines {what}: {names[:5]}" for what, names in parts.items() if names]


def bulk_held(state: Mapping[str, Any]) -> dict[str, Any]:
    """Whatever is not 0 in the books of bulk work, in a `/status`; empty at rest."""
    kept = {
        f"{one['worker']}.{book}": one["stats"][book]
        for one in state["workers"]
        for book in BATCH_BOOKS
        if one["stats"][book]
    }
    lines = state["batches"]["lines"]
    kept |= {f"lines {name}": lines[name] for name in ("waiting", "running") if lines[name]}
    kept |= {
        f"sequences {name}": state["bulk"][name] for name in ("waiting", "running") if state["bulk"][name]
    }
    return kept | ({"open": state["batches"]["open"]} if state["batches"]["open"] else {})
