"""Codecs together with sharing, host memory and several pools: a set of rows in which every two choices meet.

Each row is one test: a prompt is prefilled by one engine and decoded by another, as bytes that are copied chunk by
chunk. Tokens and log-probabilities are those of one engine alone with the same codec, the moved bytes are those of the
layout, and no slab is left. Elsewhere, with real processes or in virtual time:

    one worker for both, chunks, hits, preemption, re-read    test_loop_coded.py, system/test_coded_serving.py
    two ranks from one; a killed decode worker                system/test_coded_serving.py
    storms, migration, role switches, 2P2D, 3P3D              simulation/test_storms.py, test_machine.py
    two calibrations side by side                             simulation/test_upgrade.py
    spoilt chunks, reused slabs, aborts, random faults        faults/, transport/test_corruption.py
"""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch

from diptych.chunks import CHUNK_TOKENS
from diptych.request import SamplingParams
from engine.sequence import Sequence
from kvcache.prefix_tree import root_key
from tests.engine.coded_engine import Answers, CodedEngine, answers, check_same
from tests.unit.engine.fakes import FixedRate

# Every sequence takes one more slab after its first token.
LENGTH, NEW_TOKENS, REQUESTS = 2 * CHUNK_TOKENS - 1, 4, 4
PROMPT_CHUNKS = 2


class KvRow(NamedTuple):
    """Codec, "private" prompts or a "shared" first chunk, KV in the "pool" or parked in "host" memory, the pools."""

    codec: str
    prompts: str
    memory: str
    pools: str


CHOICES = {
    "codec": ("raw", "fp16", "int4", "nuq4-1%", "nuq3-1%", "nuq2-1%", "tq4"),
    "prompts": ("private", "shared"),
    "memory": ("pool", "host"),
    "pools": ("1P1D", "2P2D"),
}
ROWS = [
    KvRow("raw", "private", "pool", "1P1D"),
    KvRow("raw", "shared", "host", "2P2D"),
    KvRow("fp16", "private", "host", "2P2D"),
    KvRow("fp16", "shared", "pool", "1P1D"),
    KvRow("int4", "private", "host", "1P1D"),
    KvRow("int4", "shared", "pool", "2P2D"),
    KvRow("nuq4-1%", "private", "pool", "2P2D"),
    KvRow("nuq4-1%", "shared", "host", "1P1D"),
    KvRow("nuq3-1%", "private", "host", "2P2D"),
    KvRow("nuq3-1%", "shared", "pool", "1P1D"),
    KvRow("nuq2-1%", "private", "pool", "1P1D"),
    KvRow("nuq2-1%", "shared", "host", "2P2D"),
    KvRow("tq4", "private", "pool", "2P2D"),
    KvRow("tq4", "shared", "host", "1P1D"),
]


def test_every_two_choices_meet_in_a_row() -> None:
    for one, other in combinations(CHOICES, 2):
        met = {(getattr(row, one), getattr(row, other)) for row in ROWS}
        assert met == set(product(CHOICES[one], CHOICES[other])), (one, other)


def make_request(codec: str, number: int, shared: bool, hold: bool = False) -> Sequence:
    """A request whose prompt begins as all others do, or as none."""
    random = torch.Generator().manual_seed(number)
    prompt = torch.randint(3, 4000, (LENGTH,), generator=random).tolist()
    if shared:
        same = torch.Generator().manual_seed(99)
        prompt[:CHUNK_TOKENS] = torch.randint(3, 4000, (CHUNK_TOKENS,), generator=same).tolist()
    sampling = SamplingParams(max_tokens=NEW_TOKENS, seed=0, temperature=0.0, logprobs=0)
    root = root_key("the model", "", codec)
    return Sequence(f"r{number}", 1, prompt, sampling, math.inf, hold_kv=hold, root=root)


@cache
def alone(codec: str, shared: bool) -> Answers:
    """Every request by itself, without a prefix cache to find anything in."""
    found: Answers = {}
    for number in range(REQUESTS):
        worker = CodedEngine(codec, max_num_batched_tokens=LENGTH + NEW_TOKENS, chunked_prefill=False)
        worker.engine.add(make_request(worker.layout.codec, number, shared), 0.0)
        found |= answers(worker.run())
    return found


def hand_over(source: CodedEngine, target: CodedEngine, held: Sequence, shared: bool) -> int:
    """As a decode worker does it: what is known is attached, the rest is copied and shared. Returns bytes copied."""
    seq = make_request(target.layout.codec, int(held.id[1:]), shared)
    seq.output, seq.computed = list(held.output), held.computed
    seq.update_keys()
    full = seq.computed // CHUNK_TOKENS
    seq.slabs = target.holdings.attach_prefix(seq.key, seq.keys[:full])
    known = len(seq.slabs)
    seq.slabs += target.holdings.allocate(seq.key, -(-seq.total // CHUNK_TOKENS) - known)
    for far, own in zip(held.slabs[known:], seq.slabs[known:], strict=True):
        target.pool.slab_bytes(own)[:] = source.pool.slab_bytes(far)
    target.holdings.publish(seq.key, seq.keys[:full], seq.slabs)
    target.engine.adopt(seq, 0.0)
    source.holdings.release(held.key)
    return (len(seq.slabs) - known) * target.layout.chunk_bytes


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_a_row_gives_the_tokens_of_one_engine_alone(row: KvRow) -> None:
    shared, pairs = row.prompts == "shared", int(row.pools[0])
    expected, found, moved = alone(row.codec, shared), Answers(), 0
    each = REQUESTS // pairs
    # Room for the prompts; if they are to be parked, for one sequence's growth alone.
    room = (1 + each if shared else PROMPT_CHUNKS * each) + (1 if row.memory == "host" else each)
    for pair in range(pairs):
        prefill, decode = CodedEngine(row.codec), CodedEngine(row.codec, num_slabs=room, swap=40)
        decode.engine.copy_rate = FixedRate(1e15)
        outputs = []
        for number in range(pair * each, (pair + 1) * each):
            prefill.engine.add(make_request(prefill.layout.codec, number, shared, hold=True), 0.0)
            outputs += prefill.run()
        assert prefill.engine.stats.prefix_hits == (each - 1) * CHUNK_TOKENS * shared
        moved += sum(hand_over(prefill, decode, held, shared) for held in prefill.held)
        found |= answers(outputs + decode.run())
        parked = decode.engine.stats.preemptions.get("park", 0)
        assert bool(parked) == (row.memory == "host")
        assert prefill.holdings.used == decode.holdings.used == len(decode.engine.host or ()) == 0
    check_same(found, expected)
    chunks = REQUESTS * PROMPT_CHUNKS - (REQUESTS - pairs) * shared
    assert moved == chunks * decode.layout.chunk_bytes
