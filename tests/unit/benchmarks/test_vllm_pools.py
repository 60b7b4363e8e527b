"""The check of vLLM pools: its parts, how tickets are spoilt, and how answers after a fault are counted. No vLLM."""

from __future__ import annotations

import importlib
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from benchmarks import vllm_pools
from benchmarks.device_parts.faults import FaultyDeployment
from benchmarks.gpu_parts.check_part import CheckPart, PartContext
from benchmarks.load.answer_checks import AskedRequest
from benchmarks.load.channel_deployment import ChannelAnswer, ChannelDeployment
from benchmarks.vllm_parts.faults import check_answers
from benchmarks.vllm_parts.tampering import SPOILERS, Tampering
from benchmarks.vllm_parts.timed_steps import FORWARD, LOAD, MARK, STEP, FirstStep, read_first_step
from diptych.errors import TransferError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.request import Request, SamplingParams
from kvcache.layout import KvLayout
from kvtransfer.digests import DIGEST_BYTES, DigestContext
from kvtransfer.ticket import OfferedChunk, Ticket, decode_ticket, encode_ticket
from tests.support.vllm_worker_serving import KEY

LAYOUT = KvLayout(1, 1, 8, "float16")


def test_parts_exist_and_are_measured_with_the_same_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[float] = []

    def measure(part: CheckPart, context: PartContext) -> None:
        given.append(context.share)

    monkeypatch.setattr(CheckPart, "measure", measure)
    monkeypatch.setenv("TEST_VLLM_PYTHON", "/nowhere/python")
    for part in vllm_pools.PARTS:
        module, name = part.function.split(":")
        assert callable(getattr(importlib.import_module(module), name))
        command = vllm_pools.make_command(part, "cpu", tmp_path, 0.25)
        monkeypatch.setattr(sys, "argv", command[2:])
        with pytest.raises(SystemExit) as ended:
            vllm_pools.main()
        assert ended.value.code == 0
    assert given == [0.25] * len(vllm_pools.PARTS)
    assert os.environ["TEST_VLLM_PYTHON"] == "/nowhere/python"


def make_ticket() -> bytes:
    """A sound ticket over two chunks."""
    context = DigestContext(
        request="r", epoch=0, num_tokens=100, layers=(0, 1), dtype=LAYOUT.dtype, shape=LAYOUT.chunk_shape,
        fingerprint="model", chunk_bytes=LAYOUT.chunk_bytes, codec="", algorithm="xxh3",
    )  # fmt: skip
    chunks = tuple(OfferedChunk(slab, bytes(DIGEST_BYTES)) for slab in (4, 1))
    return encode_ticket(Ticket(context, "one", "life", chunks), KEY)


def spoil(kind: str, memory: bytearray) -> bytes:
    """What a spoiler of this kind makes of a sound ticket."""
    prefill = SimpleNamespace(ready={"slab_bytes": LAYOUT.chunk_bytes}, memory=memory)
    pair: Any = SimpleNamespace(prefill=prefill)
    return SPOILERS[kind](Tampering(pair, random.Random(1), [], [], {}), "name", make_ticket())


def test_each_kind_is_spoilt_in_its_own_way() -> None:
    memory, ticket = bytearray(8 * LAYOUT.chunk_bytes), make_ticket()
    assert spoil("sound", memory) == ticket and not any(memory)
    assert spoil("flipped", memory) == ticket
    (place,) = [at for at, byte in enumerate(memory) if byte]
    assert place // LAYOUT.chunk_bytes in (4, 1), "a byte of an offered slab"
    for kind in ("altered", "foreign"):
        with pytest.raises(TransferError):
            decode_ticket(spoil(kind, memory), KEY)
    stale, sound = decode_ticket(spoil("stale", memory), KEY), decode_ticket(ticket, KEY)
    assert stale.incarnation != sound.incarnation
    assert msgspec.structs.replace(stale, incarnation="life") == sound


def answer_of(tokens: list[int], failure: FailureReason | None = None, **sampling: Any) -> ChannelAnswer:
    params = SamplingParams(**({"max_tokens": 2, "seed": 1, "temperature": 0.0} | sampling))
    answer = ChannelAnswer(Request("r", [1], params, 1.0), tokens=tokens, finish="" if failure else "length")
    answer.failure = None if failure is None else RequestFailure(failure, "it ended")
    return answer


def test_only_what_cannot_be_continued_may_end_with_an_error() -> None:
    stayed = [
        answer_of([5, 6]),
        answer_of([5, 9]),
        answer_of([5], FailureReason.NOT_CONTINUABLE, presence_penalty=1.0),
        answer_of([5], FailureReason.NOT_CONTINUABLE),
        answer_of([5], FailureReason.INTERNAL_ERROR, temperature=1.0),
    ]
    asked = [AskedRequest(list(one.request.prompt), one.request.sampling) for one in stayed]
    faulty = FaultyDeployment(cast(ChannelDeployment, None), asked, random.Random(0))
    faulty.stayed = list(enumerate(stayed))
    found = check_answers(faulty, [answer_of([5, 6])] * len(stayed))
    assert (found["fault_answers"], found["fault_wrong"], found["fault_failed"]) == (5, 1, 2)
    assert found["fault_ended"] == {"not_continuable": 2, "internal_error": 1}


def test_the_first_step_after_a_ticket_is_found_with_its_loads(tmp_path: Path) -> None:
    log = tmp_path / "log"
    events = [
        (STEP, 1.0, 0.0), (FORWARD, 1.25, 0.0),
        (LOAD, 1.5, 8.0), (STEP, 2.0, 0.0), (LOAD, 2.25, 0.125), (FORWARD, 2.5, 0.0), (LOAD, 2.75, 4.0),
        (STEP, 3.0, 0.0), (FORWARD, 3.5, 0.0),
    ]  # fmt: skip
    log.write_text("another line\n" + "".join(f"{MARK} {what} {at} {more}\n" for what, at, more in events))
    assert read_first_step(log, 1.25) == FirstStep(0.875, 1.25)
    with pytest.raises(ValueError, match="empty"):
        read_first_step(log, 4.0)
