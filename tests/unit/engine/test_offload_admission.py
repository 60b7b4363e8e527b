"""The places of a block: who is admitted, what a step computes, and that no room is lost or given twice."""

from __future__ import annotations

import math
import random

import pytest

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import KeepSpec
from diptych.request import SamplingParams
from engine.offload.block_admission import BlockAdmission
from engine.offload.policy import BlockPolicy
from engine.offload.sizes import BlockModel, batch_chunks, check_caps, predict_needs, smallest_policy
from engine.offload.units import cut_works
from engine.sequence import Sequence, SequenceRefused, num_chunks
from engine.step_work import StepWork

POLICY = BlockPolicy(rows=2, batches=3, prompt_tokens=100, output_tokens=28)


def ask(name: str, prompt: int, max_tokens: int = 8) -> Sequence:
    return Sequence(
        name, 1, [1] * prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0), math.inf
    )


def test_sequences_take_places_in_order_of_arrival_and_small_ones_pass() -> None:
    schedule = BlockAdmission(POLICY, 1000)
    # A batch has room for four chunks.
    assert batch_chunks(POLICY) == 4
    for name, prompt in (("a", 150), ("b", 150), ("c", 150), ("d", 100), ("e", 20)):
        schedule.add(ask(name, prompt), 0.0)
    assert [seq.id for seq in schedule.admit(0.0)] == ["a", "b", "c", "e"]
    assert [seq.id for seq in schedule.waiting.values()] == ["d"]
    schedule.release("a#1")
    assert [seq.id for seq in schedule.admit(0.0)] == ["d"]


@pytest.mark.parametrize("batches", [1, 2])
def test_a_long_line_is_passed_by_no_more_than_a_block_of_others(batches: int) -> None:
    schedule = BlockAdmission(BlockPolicy(2, batches, 100, 28), 1000)
    passed: list[str] = []
    # There are always short lines, and no batch is ever empty by itself.
    for number in range(2 * batches + 1):
        schedule.add(ask(f"first-{number}", 100), 0.0)
    schedule.admit(0.0)
    schedule.add(ask("long", 240), 0.0)
    for number in range(100):
        schedule.add(ask(f"r{number}", 100), 0.0)
        batch = schedule.batches[number % batches]
        if batch.running:
            schedule.release(next(iter(batch.running)))
        admitted = [seq.id for seq in schedule.admit(0.0)]
        if "long" in admitted:
            break
        passed += [name for name in admitted if name.startswith("r")]
    assert "long" in admitted
    assert len(passed) <= schedule.policy.sequences + 2 * (batches - 1)
    assert all(one.kept_for is None for one in schedule.batches)


def test_a_batch_is_no_longer_kept_for_a_line_that_left() -> None:
    schedule = BlockAdmission(BlockPolicy(2, 1, 100, 28), 1000)
    for name, length in (("a", 100), ("long", 240), ("b", 100), ("c", 100), ("d", 100)):
        schedule.add(ask(name, length), 0.0)
    assert [seq.id for seq in schedule.admit(0.0)] == ["a", "b"]
    schedule.release("a#1")
    assert [seq.id for seq in schedule.admit(0.0)] == ["c"]
    schedule.release("b#1")
    assert schedule.admit(0.0) == [] and schedule.batches[0].kept_for == "long#1"
    schedule.release("long#1")
    assert [seq.id for seq in schedule.admit(0.0)] == ["d"]


def test_a_step_has_a_token_of_each_that_decodes_and_prompts_within_the_room() -> None:
    schedule = BlockAdmission(BlockPolicy(2, 1, 100, 60), 1000)
    for name, prompt in (("long", 180), ("short", 50)):
        schedule.add(ask(name, prompt), 0.0)
    schedule.admit(0.0)
    assert [(one.seq.id, one.count) for one in schedule.plan_step()] == [("long", 180), ("short", 20)]
    for one in schedule.plan_step():
        one.seq.computed += one.count
    assert [(one.seq.id, one.count) for one in schedule.plan_step()] == [("short", 30)]
    long = schedule.find("long#1")
    assert long is not None
    long.output.append(7)
    assert [(one.seq.id, one.count) for one in schedule.plan_step()] == [("long", 1), ("short", 30)]


def test_what_can_never_run_is_refused() -> None:
    schedule = BlockAdmission(POLICY, 300, max_waiting=1)
    for seq, code in (
        (ask("large", 248), None),
        (ask("longer", 257), "internal_error"),
        (ask("empty", 0), "internal_error"),
        (ask("next", 1), "overloaded"),
    ):
        if code is None:
            schedule.add(seq, 0.0)
            continue
        with pytest.raises(SequenceRefused) as caught:
            schedule.add(seq, 0.0)
        assert caught.value.code == code
    evicting = ask("evicting", 10)
    evicting.keep = KeepSpec(0.5)
    with pytest.raises(SequenceRefused):
        BlockAdmission(POLICY, 300).add(evicting, 0.0)
    with pytest.raises(ValueError, match="already here"):
        schedule.add(ask("large", 10), 0.0)


def test_the_longest_sequence_is_what_the_model_takes_and_a_batch_has_room_for() -> None:
    assert BlockAdmission(POLICY, 200).max_model_len == 200
    schedule = BlockAdmission(POLICY, 100_000)
    assert schedule.max_model_len == batch_chunks(POLICY) * CHUNK_TOKENS == 256
    # A line without max_tokens, whose answer may have all that the context has left.
    schedule.add(ask("open", 20, max_tokens=100_000 - 20), 0.0)
    assert [seq.id for seq in schedule.admit(0.0)] == ["open"]


def decode(schedule: BlockAdmission) -> None:
    """One step of all that have a place: each gets a token, and those that have all of theirs leave."""
    for step in schedule.plan_step():
        step.seq.computed += step.count
        if step.seq.pending == 0:
            step.seq.output.append(7)
            if (
                step.seq.total >= schedule.max_model_len
                or len(step.seq.output) >= step.seq.sampling.max_tokens
            ):
                schedule.release(step.seq.key)


def test_lines_without_max_tokens_share_a_batch_and_all_end() -> None:
    schedule = BlockAdmission(BlockPolicy(rows=4, batches=1, prompt_tokens=40, output_tokens=24), 1000)
    names = [f"r{i}" for i in range(6)]
    for name in names:
        schedule.add(ask(name, 30, max_tokens=1000 - 30), 0.0)
    running, steps = [], 0
    while len(schedule):
        schedule.grow_rooms()
        schedule.admit(0.0)
        schedule.check_books()
        assert all(num_chunks(seq.total) <= len(seq.slabs) for seq in schedule.batches[0].running.values())
        running.append([seq.id for seq in schedule.batches[0].running.values()])
        decode(schedule)
        steps += 1
        assert steps < 3000
    assert running[0] == names[:4]
    # A batch has four chunks: the oldest line gets all of them at last, and is computed once.
    ends = [next(i for i in range(len(running), 0, -1) if name in running[i - 1]) for name in names]
    assert ends[0] == min(ends) == 256 - 30
    assert all(names[0] in one for one in running[: ends[0]])
    assert schedule.preemptions > 0 and schedule.used == 0


def test_no_room_is_lost_or_given_twice() -> None:
    draw, schedule, count = random.Random(1), BlockAdmission(POLICY, 1000), 0
    for _ in range(2000):
        kind = draw.randrange(4)
        if kind == 0:
            count += 1
            schedule.add(ask(f"r{count}", draw.randrange(1, 200), draw.choice((8, 900))), 0.0)
        elif kind == 1:
            schedule.grow_rooms()
            schedule.admit(0.0)
            assert list(schedule.waiting.values()) == sorted(
                schedule.waiting.values(), key=lambda seq: seq.number
            )
            decode(schedule)
        elif len(schedule):
            key = draw.choice([seq.key for seq in schedule.sequences()])
            (schedule.put_back if kind == 2 and key not in schedule.waiting else schedule.release)(key)
        for batch in schedule.batches:
            held = [chunk for seq in batch.running.values() for chunk in seq.slabs]
            assert sorted(held + batch.free) == list(range(batch_chunks(POLICY)))
            assert len(batch.running) <= POLICY.rows


def test_works_are_cut_into_units_and_put_together_again() -> None:
    draw = random.Random(2)
    for _ in range(200):
        works = [
            StepWork(
                list(range(draw.randrange(1, 40))),
                draw.choice((0, 7)),
                [0],
                draw.choice(("last", "all", "none")),
                5,
            )
            for _ in range(draw.randrange(1, 6))
        ]
        most = draw.randrange(1, 30)
        pieces = cut_works(works, most)
        assert all(0 < sum(len(part.work.tokens) for part in piece) <= most for piece in pieces)
        parts = [part for piece in pieces for part in piece]
        for index, work in enumerate(works):
            mine = [part for part in parts if part.index == index]
            assert sum((part.work.tokens for part in mine), []) == work.tokens
            assert [part.work.start for part in mine] == [
                work.start + sum(len(other.work.tokens) for other in mine[:i]) for i in range(len(mine))
            ]
            assert sum(part.work.wanted for part in mine) == work.wanted
            assert [part.row for part in mine] == [
                sum(other.work.wanted for other in mine[:i]) for i in range(len(mine))
            ]


def test_needs_are_sums_of_rooms() -> None:
    model = BlockModel([100, 200, 300, 400], 50, 4096, 40, 7, 3)
    policy = BlockPolicy(
        2, 3, 100, 28, weights_in_memory=0.5, kv_in_memory=0.25, hidden_in_memory=1 / 3, overlap=True
    )
    needs = predict_needs(model, policy)
    # Layers 1 and 3 stay; of the others the largest is read into two buffers.
    assert needs.memory["weights"] == 600 + 50 and needs.memory["weights being read"] == 600
    assert needs.disk["weights"] == 400
    room = 4 * 4096
    assert needs.memory["KV"] == 3 * room and needs.disk["KV"] == 9 * room
    assert needs.memory["KV being read"] == 2 * room
    assert needs.memory["activations"] == 8192 and needs.disk["activations"] == 2 * 8192
    assert needs.memory_bytes == sum(needs.memory.values())
    assert check_caps(model, policy, needs.memory_bytes, needs.disk_bytes) == needs
    assert predict_needs(model, smallest_policy(policy)).memory_bytes < needs.memory_bytes
    assert CHUNK_TOKENS == 64
