"""The answer of a line is written as it comes: it is never in memory as a whole, and its result is as it was."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.log_format import IDS_FIELD
from diptych.logs.request_ids import answer_id
from diptych.messages import Output
from diptych.request import Request, Tenancy
from services.gateway.batches import database_thread
from services.gateway.batches.data_dir import write_whole
from services.gateway.batches.line_runner import LineAnswer, LineRunner
from services.gateway.batches.records import LineEnd, result_text
from services.gateway.batches.storage import answer_spool
from services.gateway.batches.storage.answer_spool import (
    LINE_ENDS,
    MAX_MEMORY_BYTES,
    PIECE_BYTES,
    AnswerSpool,
    escape_line_ends,
)
from services.gateway.batches.store import BatchStore
from services.gateway.generation.answer_memory import MIN_READ_S, AnswerMemory
from services.gateway.generation.completion_format import CompletionFormat
from services.gateway.generation.formats import OutputFormat, ResponseHead
from services.gateway.generation.generation import Generation, SequenceSink
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.resolve import make_prompt, resolve_completion
from services.gateway.openai.schemas.batch_schema import LineResponse, LineResult
from services.gateway.openai.schemas.request_schema import CompletionRequest
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.validate import RequestRules
from services.gateway.service import GatewayService
from tests.support.waiting import wait_for
from tests.unit.gateway.batches.stored_batches import add_batch, end, reopen, results

CHAT = "/v1/chat/completions"
METRICS = GatewayMetrics()
PART = b'"' + b"x" * (PIECE_BYTES - 3) + b'",'
TEXTS = st.lists(st.sampled_from([*LINE_ENDS, b"\xe2\x80\xa7", b"\xc2\xa0", "ü".encode(), b"x", b" "]))


async def spooled(folder: Path, *parts: bytes) -> AnswerSpool:
    spool = AnswerSpool(folder)
    for part in parts:
        await spool.write(part)
    return spool


def body_of(spool: AnswerSpool) -> bytes:
    return b"".join(spool.iter_pieces())


@given(TEXTS, st.lists(st.integers(0, 60)))
def test_ends_of_lines_are_escaped_wherever_parts_meet(
    tmp_path_factory: pytest.TempPathFactory, chars: list[bytes], cuts: list[int]
) -> None:
    text = b"".join(chars)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[start:stop] for start, stop in zip(borders, borders[1:], strict=False)]
    spool = asyncio.run(spooled(tmp_path_factory.getbasetemp(), *parts))
    assert body_of(spool) == escape_line_ends(text)


async def test_most_answers_need_no_file_and_no_file_has_a_name(tmp_path: Path) -> None:
    small = await spooled(tmp_path, b"x" * MAX_MEMORY_BYTES)
    assert small.memory_bytes == len(small) == MAX_MEMORY_BYTES
    large = await spooled(tmp_path, *[b"y" * 1000] * 1000)
    assert large.memory_bytes <= MAX_MEMORY_BYTES and len(large) == 1_000_000
    assert not list(tmp_path.iterdir()), "the kernel removes it, also after a crash"
    assert body_of(large) == body_of(large) == b"y" * 1_000_000
    assert max(map(len, large.iter_pieces())) <= PIECE_BYTES
    descriptor = large._file.descriptor if large._file else -1
    inode = os.fstat(descriptor).st_ino
    del large

    def closed() -> bool:
        try:
            # The number may be that of another file by now.
            return os.fstat(descriptor).st_ino != inode
        except OSError:
            return True

    # The thread that wrote holds the file a moment longer than the writer waits.
    wait_for(closed, timeout_s=60)


async def test_while_the_disk_takes_nothing_the_writer_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = asyncio.Event()
    monkeypatch.setattr(answer_spool, "MIN_PAUSE_S", 0.001)

    def refuse(descriptor: int, data: bytes, offset: int) -> None:
        if not full.is_set():
            write_whole(descriptor, data[:100], offset)
            raise OSError(28, "no room")
        write_whole(descriptor, data, offset)

    monkeypatch.setattr(answer_spool, "write_whole", refuse)
    spool = AnswerSpool(tmp_path)
    writing = asyncio.create_task(spool.write(PART))
    await asyncio.sleep(0.05)
    assert not writing.done() and spool.memory_bytes == len(PART)
    full.set()
    await writing
    await spool.write(b"1]")
    assert body_of(spool) == PART + b"1]"


# ---- lines that run


class ReadyBackend:
    """Answers each sequence with one token, at once."""

    def submit_requests(self, asked: Sequence[tuple[Request, SequenceSink]]) -> None:
        for request, sink in asked:
            sink.deliver_output(Output(request.id, 0, [69]), 0.0)
            sink.finish_sequence("length", 0.0)

    def cancel_request(self, request: str, *others: str) -> None:
        """Nothing runs."""

    stop_request = cancel_request

    def find_refusal(self, num_requests: int, tenant: str) -> RequestFailure | None:
        return None


class Format(CompletionFormat):
    """A body of `num_parts` parts; without `ends` others need its memory when these are written."""

    num_parts, ends = 0, True
    memory: AnswerMemory

    def full_body_parts(self, *_: object) -> Iterator[bytes]:
        yield b'{"choices":['
        for _part in range(self.num_parts):
            yield bytes(PART)
        if not self.ends:
            with contextlib.suppress(RequestError):
                self.memory.hold_bytes("", 1 << 30)
            yield bytes(PART)
        yield b'"end"]}'


async def run_line(folder: Path, rules: RequestRules, num_parts: int, ends: bool = True) -> LineAnswer:
    class Shape(Format):
        memory = AnswerMemory(1 << 20, itertools.count(step=MIN_READ_S).__next__)

    Shape.num_parts, Shape.ends = num_parts, ends

    async def create(path: str, body: bytes, caller: Caller) -> tuple[Generation, OutputFormat]:
        request = parse_body(b'{"model":"toy","prompt":"x"}', CompletionRequest, 16)
        asked = resolve_completion(request, [make_prompt([1, 2], "x")], None, rules)
        asked = replace(asked, origin=Tenancy(client_id=caller.client_id))
        name = answer_id("cmpl-", caller.request_id)
        generation = Generation(
            name, asked, rules.tokenizer, ReadyBackend(), METRICS, 1 << 20, Shape.memory, arrived_s=0.0, deadline_s=60.0
        )  # fmt: skip
        return generation, Shape(ResponseHead(name, 0, "toy", None), asked, LogprobJson(rules.tokenizer))

    running: set[Generation] = set()
    service = SimpleNamespace(rules=rules, open=running, create_generation=create)
    runner = LineRunner(cast(GatewayService, service), folder)
    answer = await runner.run_line(CHAT, b"{}", "t", True, "batch_1", 'c "response":{', 60.0)
    assert not running and Shape.memory.held_bytes == (0 if ends else 1 << 30)
    return answer


async def test_a_line_of_26_mb_is_never_in_memory(
    store: BatchStore, rules: RequestRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await add_batch(store)
    sizes: list[int] = []

    def write(descriptor: int, data: bytes, offset: int) -> None:
        sizes.append(len(data))
        write_whole(descriptor, data, offset)

    monkeypatch.setattr(answer_spool, "write_whole", write)
    monkeypatch.setattr(database_thread, "write_whole", write)
    tracemalloc.start()
    try:
        answer = await run_line(store.data_dir.uploads, rules, 104)
        text = answer.to_text("c1")
        await store.end_lines(batch.id, [LineEnd(number=1, succeeded=True, text=text)])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.succeeded and len(answer.body) > 26_000_000
    assert peak_bytes < 4 << 20 and max(sizes) <= 2 * PIECE_BYTES
    row = json.loads(store.content_path(batch.output_file).read_bytes())
    assert (row["custom_id"], row["response"]["status_code"], row["error"]) == ("c1", 200, None)
    assert len(row["response"]["body"]["choices"]) == 105


async def test_a_small_result_is_as_it_was(tmp_path: Path, rules: RequestRules) -> None:
    answer = await run_line(tmp_path, rules, 0)
    text = answer.to_text('"body":{')
    assert not isinstance(text, bytes)
    line = b"".join(text.iter_pieces())
    assert len(text) == len(line)
    row = json.loads(line)
    response = LineResponse(200, answer.request_id, cast(Any, {"choices": ["end"]}))
    assert line == result_text(LineResult(row["id"], '"body":{', response))


async def test_an_answer_that_was_interrupted_is_no_answer(
    tmp_path: Path, rules: RequestRules, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await run_line(tmp_path, rules, 3, ends=False)
    assert not answer.succeeded and answer.failure is not None
    assert answer.failure.reason is FailureReason.OVERLOADED and answer.failure.client_may_retry
    assert isinstance(answer.body, bytes) and json.loads(answer.body)["error"]["code"]
    ids = vars(caplog.records[-1])[IDS_FIELD]
    assert (ids.request, ids.client) == (answer.request_id, "batch_1:c%20%22response%22%3A%7B")
    assert ids.sequence == answer_id("cmpl-", answer.request_id)


async def test_a_long_result_is_written_once_whatever_fails(
    store: BatchStore, rules: RequestRules, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await add_batch(store)
    await store.end_lines(batch.id, [end(1)])
    text = (await run_line(store.data_dir.uploads, rules, 8)).to_text("c2")
    calls = 0

    def break_once(descriptor: int, data: bytes, offset: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "no room")
        write_whole(descriptor, data, offset)

    monkeypatch.setattr(database_thread, "write_whole", break_once)
    with pytest.raises(database_thread.StorageError):
        await store.end_lines(batch.id, [LineEnd(number=2, succeeded=True, text=text)])
    assert store.content_path(batch.output_file).stat().st_size > PIECE_BYTES
    again = reopen(store, clock)
    try:
        (found,) = await again.recover()
        assert results(again, found.output_file) == ["c1"], "what was not committed is cut off"
        line = LineEnd(number=2, succeeded=True, text=text)
        await asyncio.gather(again.end_lines(batch.id, [line]), again.end_lines(batch.id, [end(3), line]))
        assert sorted(results(again, batch.output_file)) == ["c1", "c2", "c3"]
    finally:
        again.close()
