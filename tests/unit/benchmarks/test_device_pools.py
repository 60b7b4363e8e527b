"""The check of workers on a device: which aims are promises, and how its parts count."""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import load_file

from benchmarks import device_pools
from benchmarks.device_parts import flow, ordering
from benchmarks.device_parts.faults import KILLS, PHASES, FaultyDeployment
from benchmarks.device_parts.flipped_bytes import flip_offered
from benchmarks.device_parts.tokens import ROUNDING, round_weights
from benchmarks.gpu_parts.check_part import CheckPart, PartContext
from benchmarks.load.answer_checks import FIRST_ID, VOCAB, AskedRequest
from benchmarks.load.channel_deployment import ChannelAnswer, ChannelDeployment
from diptych.chunks import CHUNK_TOKENS
from diptych.failure_statuses import FailureReason
from diptych.request import Request, RequestStage, SamplingParams
from kvcache.layout import KvLayout
from kvtransfer.digests import DIGEST_BYTES, DigestContext
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.ticket import OfferedChunk, Ticket, encode_ticket
from router.effects import AttemptRetried, KvMoved
from services.host.model_probe import EMBEDDED_MODEL, resolve_embedded


def test_rounded_weights_differ_by_one_rounding_and_the_rest_of_the_model_is_the_same(tmp_path: Path) -> None:
    source = Path(resolve_embedded(EMBEDDED_MODEL))
    round_weights(source, tmp_path / "rounded")
    before, after = (load_file(one / "model.safetensors") for one in (source, tmp_path / "rounded"))
    assert before.keys() == after.keys()
    moved = [(after[name] / before[name].float() - 1).nan_to_num(0.0).abs().max().item() for name in before]
    assert 0 < max(moved) <= 2 * ROUNDING
    assert {one.name for one in source.iterdir()} == {one.name for one in (tmp_path / "rounded").iterdir()}


def summary(**changes: Any) -> dict[str, Any]:
    aims = {"unexplained": "= 0", "waits_proven": "= 1", "handoff_ratio": "≤ 2"}
    found = {"figures": {"unexplained": 0}, "broken": [], "missed": [], "aims": aims, "seconds": 1.0}
    return found | changes


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 0),
        ({"missed": ["handoff_ratio"]}, 0),
        ({"missed": ["handoff_ratio", "unexplained"]}, 1),
        ({"missed": ["waits_proven"]}, 1),
        ({"broken": ["same"]}, 1),
    ],
)
def test_a_broken_promise_is_a_status_and_a_ratio_is_not(
    changes: dict[str, Any],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(device_pools, "run_check", lambda *args: summary(**changes))
    monkeypatch.setattr(sys, "argv", ["device_pools", "--json", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        device_pools.main()
    assert ended.value.code == status
    shown = json.loads(capsys.readouterr().out)
    assert shown["unexplained"] == 0 and shown["device"] == "emulated" and shown["share"] == 1.0


def test_parts_are_measured_in_processes_with_the_same_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[float] = []

    def measure(part: CheckPart, context: PartContext) -> None:
        given.append(context.share)

    monkeypatch.setattr(CheckPart, "measure", measure)
    for part in device_pools.PARTS:
        command = device_pools.make_command(part, "emulated", tmp_path, 0.25)
        monkeypatch.setattr(sys, "argv", command[2:])
        with pytest.raises(SystemExit) as ended:
            device_pools.main()
        assert ended.value.code == 0
    assert given == [0.25] * len(device_pools.PARTS)


class Report:
    """What pytest says of a test."""

    def __init__(self, name: str, when: str, outcome: str, **properties: int) -> None:
        self.nodeid, self.when, self.user_properties = f"tests/x.py::{name}", when, list(properties.items())
        self.passed, self.failed, self.skipped = (outcome == one for one in ("passed", "failed", "skipped"))


def test_late_copies_are_counted(tmp_path: Path) -> None:
    counter = ordering.LateCounter(PartContext("emulated", tmp_path, tmp_path / "late.json"))
    for name, when, outcome, properties in (
        ("test_a", "setup", "passed", {}),
        ("test_a", "call", "passed", {"late_handoffs": 600, "late_wrong": 0, "other": 7}),
        ("test_b[late]", "call", "failed", {"late_handoffs": 400, "late_wrong": 2}),
        ("test_wait_is_needed[x]", "call", "passed", {}),
        ("test_wait_is_needed[y]", "call", "failed", {}),
        ("test_c", "setup", "skipped", {}),
        ("test_flips", "call", "passed", {"copy_flips": 8, "copy_flips_found": 6}),
    ):
        counter.pytest_runtest_logreport(Report(name, when, outcome, **properties))
    counter.pytest_sessionfinish()
    found = json.loads((tmp_path / "late.json").read_text())
    assert (found["late_tests"], found["late_handoffs"], found["late_wrong"]) == (6, 1000, 2)
    assert (found["waits"], found["waits_proven"], found["copy_flips_found"]) == (2, 0.5, 0.75)
    assert found["late_failing"] == ["test_b[late]", "test_wait_is_needed[y]", "test_c"]
    assert found["late_failed"] == 3 and "other" not in found


def test_nothing_that_was_not_shown_counts_as_proven(tmp_path: Path) -> None:
    counter = ordering.LateCounter(PartContext("emulated", tmp_path, tmp_path / "late.json"))
    found = counter.figures()
    assert (found["waits_proven"], found["copy_flips_found"]) == (0, 0)


def test_a_bit_flips_in_a_chunk_that_is_offered() -> None:
    layout = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32")
    # Other tests of this process may have left memory of common sizes.
    num_slabs = 1009
    memory, rng = SharedMemory(num_slabs * layout.chunk_bytes), random.Random(0)
    shape = (layout.layers, layout.kv_heads, 2, CHUNK_TOKENS, layout.head_dim)
    context = DigestContext("r", 0, 130, (0, 2), layout.dtype, shape, "model", layout.chunk_bytes)
    chunks = tuple(OfferedChunk(slab, bytes(DIGEST_BYTES)) for slab in (5, 2, 7))
    raw = encode_ticket(Ticket(context, "prefill-0", "life", chunks), b"key")
    for _ in range(20):
        memory.view[:] = bytes(len(memory.view))
        flip_offered(os.getpid(), raw, num_slabs, rng)
        ((at, value),) = [(at, value) for at, value in enumerate(memory.view.tobytes()) if value]
        assert at // layout.chunk_bytes in (5, 2, 7) and value.bit_count() == 1
    with pytest.raises(OSError, match="shares no memory"):
        flip_offered(os.getpid(), raw, num_slabs + 1, rng)
    memory.close()


def make_answer(**stages: float) -> ChannelAnswer:
    answer = ChannelAnswer(Request("r", [1], SamplingParams(9, 0), math.inf))
    answer.entered_s = {RequestStage[name.upper()]: at_s for name, at_s in stages.items()}
    return answer


def test_times_of_a_hand_off() -> None:
    answer = make_answer(prefilled=1.0, transferring=1.5, decoding=4.0)
    answer.moved.append(KvMoved("r", "prefill-0", "decode-0", "shm", 10, 0.4, hidden_s=0.3, exposed_s=0.1))
    assert (flow.offer_s(answer), flow.transfer_s(answer), flow.exposed_s(answer)) == (0.5, 2.5, 0.1)
    assert flow.hidden_share(answer) == pytest.approx(0.75)
    answer.moved.append(KvMoved("r", "prefill-0", "decode-0", "shm", 0, 0.0))
    assert flow.hidden_share(answer) == 0


def test_prompts_of_later_rounds_share_nothing_with_earlier_ones() -> None:
    asked = [AskedRequest(prompt, flow.greedy(1)) for prompt in flow.make_prompts(3, 70, seed=1)]
    assert flow.shift_prompts(asked, 0) == asked
    later = flow.shift_prompts(asked, 1)
    for before, after in zip(asked, later, strict=True):
        assert all(left != right for left, right in zip(before.prompt, after.prompt, strict=True))
        assert all(FIRST_ID <= token < VOCAB for token in after.prompt)


def test_an_offer_counts_as_found_corrupt_if_its_transfer_failed() -> None:
    faulty = FaultyDeployment(cast(ChannelDeployment, None), [], random.Random(0))
    assert faulty.corrupt_found == 0
    faulty.spoilt = [make_answer() for _ in range(4)]
    reasons = (FailureReason.KV_TRANSFER_FAILED, FailureReason.KV_TRANSFER_FAILED, FailureReason.WORKER_LOST)
    for answer, reason in zip(faulty.spoilt, reasons, strict=False):
        answer.retries.append(AttemptRetried("r", reason.value, 1))
    assert faulty.corrupt_found == 0.5 and faulty.counts()["flipped"] == 4
    assert len(set(PHASES)) == 8 and KILLS % len(PHASES) == 0
