"""Both roles over the embedded model with heads that drop tokens: a handed-over answer is that of one worker alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from diptych.eviction_spec import KEEP_ALL, KeepSpec, decision_tokens
from diptych.messages import Generate
from engine.sequence import num_chunks
from tests.engine.cpu.eviction.evicted_runs import make_runner, source_tokens
from tests.engine.workers.model_bench import TOKENS, ModelBench
from tests.engine.workers.worker_bench import sampling

PROMPT = source_tokens(330)
KEEP = KeepSpec(0.3, 64)
NUM_SLABS = 30


@pytest.fixture(scope="module")
def bench() -> Iterator[ModelBench]:
    """Left as it was found: nothing is held, the prompt's whole chunks are cached."""
    bench = ModelBench(partial(make_runner, NUM_SLABS))
    yield bench
    bench.check_rest()


def test_a_handed_over_answer_is_that_of_one_worker_alone(bench: ModelBench) -> None:
    """From its first token, and from any other at which it moves; and less is moved than without eviction."""
    bench.decode.tell(Generate("alone", 0, PROMPT, [], sampling(TOKENS), 60.0, keep=KEEP))
    alone = bench.decode.tokens("alone")
    assert len(alone) == TOKENS
    whole, _ = bench.hand_over("whole", PROMPT, [], KEEP_ALL)
    assert whole != alone, "what is dropped matters"
    for count in (0, 1, 70, 128):
        rest, num_bytes = bench.hand_over(f"moved-{count}", PROMPT, alone[:count], KEEP)
        assert alone[:count] + rest == alone
        # The chunk below the boundary is cached here.
        behind = decision_tokens(len(PROMPT), len(PROMPT) + count) - KEEP.boundary
        assert num_bytes <= (num_chunks(behind) - 1) * bench.decode.pool.layout.chunk_bytes
