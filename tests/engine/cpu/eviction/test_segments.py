"""Segments in the evictor: where they end, what attention over them is, and that decisions leave them as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from diptych.eviction_spec import ADA, SEGMENT_SLABS, KeepSpec
from engine.cpu.eviction.segment_kernels import build_segment_kernel
from engine.step_work import StepWork
from tests.engine.cpu.eviction.evicted_runs import EvictedRun, make_runner, source_tokens
from tests.engine.cpu.eviction.segmented_runs import CALIBRATED, SPEC, WEIGHTS, SegmentedRun, make_cutting

TOKENS = source_tokens(900)
PROMPT = 700
STEPS = [PROMPT, 64, 64, 20]


class BagRun(SegmentedRun):
    """The same without segments."""

    def evict(self) -> None:
        """As `EvictedRun`."""
        EvictedRun.evict(self)


@pytest.mark.parametrize("codec", ["raw", "nuq4-1%"])
@pytest.mark.parametrize("boundary", [0, 64])
def test_rows_in_segments_count_as_those_of_a_bag(codec: str, boundary: int) -> None:
    """The same rows stay, and logits agree, over two decisions about the answer."""
    spec = KeepSpec(0.6, boundary, WEIGHTS.rule)
    cut, whole = (kind(*make_cutting(codec), TOKENS, PROMPT, spec) for kind in (SegmentedRun, BagRun))
    found, expected = cut.run(STEPS), whole.run(STEPS)
    assert cut.segments and not whole.segments
    for one, other in zip(cut.reports, whole.reports, strict=True):
        assert (one.kept_rows, one.all_rows, one.policies) == (
            other.kept_rows,
            other.all_rows,
            other.policies,
        )
        assert one.bag_slabs < other.bag_slabs
    assert torch.equal(found[:PROMPT], expected[:PROMPT])
    # Codes of answer rows may change with the last bit.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if codec == "raw" else 0.05)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_where_segments_end_depends_on_what_is_before_alone() -> None:
    """A longer prompt, and one that goes on differently, has the same ones, but for those at its end."""
    runner, pool = make_cutting()
    cut = dict[str, list[Any]]()
    for name, tokens in {
        "whole": TOKENS[:PROMPT], "longer": TOKENS[:860], "other": TOKENS[:512] + TOKENS[: PROMPT - 512],
    }.items():  # fmt: skip
        run = SegmentedRun(runner, pool, tokens, len(tokens), SPEC, name)
        run.run([len(tokens)])
        cut[name] = list(run.segments)
        assert run.segments[-1].end <= (len(tokens) - 64) // 64
        assert all(1 <= one.slabs <= SEGMENT_SLABS for one in run.segments)
        pool.give_back(run.slabs, name)
    assert cut["whole"][:-1] == cut["longer"][: len(cut["whole"]) - 1]
    common = [one for one in cut["whole"][:-1] if one.end <= 7]
    assert common and cut["other"][: len(common)] == common


def test_segments_that_several_rows_have_are_read_together() -> None:
    """Attention agrees to 1e-5 with that of segments of one's own, and the kernel is compiled once."""
    runner, pool = make_cutting("raw", 200)
    run = SegmentedRun(runner, pool, TOKENS, PROMPT, SPEC)
    run.run([PROMPT])
    bag, works = run.slabs[run.lead + 1 :], list[StepWork]()
    [alone] = runner.run([run.next_work(1)])
    for number in range(12):
        ring, key = pool.take_slabs(1, "a")[0], f"copy {number}"
        runner.load_kept(key, SPEC.boundary, PROMPT, run.segment_slabs + bag, run.segments)
        work = run.next_work(1)
        assert work.kept is not None
        slabs = [*run.slabs[: run.lead], ring, *bag]
        works.append(replace(work, slabs=slabs, kept=replace(work.kept, key=key)))
    for count in (12, 7, 1):
        for logits in runner.run(works[:count]):
            torch.testing.assert_close(logits, alone, rtol=0, atol=1e-4)
    kernel: Any = build_segment_kernel(pool.layout.head_dim)
    assert len(kernel.signatures) == 1


@pytest.mark.parametrize("codec", ["raw", "nuq4-1%"])
def test_what_a_step_needs_is_compiled_before(codec: str) -> None:
    """Also the kernel by which several rows read segments together."""
    # Other tests may have compiled it.
    build_segment_kernel.cache_clear()
    runner, _ = make_cutting(codec, 8)
    runner.warm()
    kernels = runner.rank_evictor.list_kernels()
    assert all(kernel.signatures for kernel in kernels if hasattr(kernel, "signatures"))
    assert runner.cuts_kept


def test_only_zap_on_one_rank_has_segments() -> None:
    runner, pool = make_cutting()
    run = SegmentedRun(runner, pool, TOKENS, PROMPT, KeepSpec(0.5, 64, ADA))
    run.run([PROMPT])
    assert not run.segments
    plain, _ = make_runner(4, setup=replace(CALIBRATED, surrogate=None))
    assert runner.cuts_kept and not plain.cuts_kept


def test_maps_of_other_segments_than_expected_are_not_loaded() -> None:
    """Each ends, takes slabs and keeps rows as its sequence's ticket says."""
    runner, pool = make_cutting()
    run = SegmentedRun(runner, pool, TOKENS, PROMPT, SPEC)
    run.run([PROMPT])
    kept, (first, *others) = [*run.segment_slabs, *run.slabs[run.lead + 1 :]], run.segments
    lies: list[dict[str, Any]] = [{"end": first.end - 1}, {"slabs": 3 - first.slabs}, {"digest": bytes(16)}]
    wrong = [(structs.replace(first, **lie), *others) for lie in lies]
    for expected in [*wrong, (), (first,), (*run.segments, first), (*others, first)]:
        with pytest.raises(ValueError):
            runner.load_kept("b", SPEC.boundary, PROMPT, kept, expected)
    with pytest.raises(ValueError, match="segment 0 has the map of other rows"):
        runner.load_kept("b", SPEC.boundary, PROMPT, kept, wrong[2])
    with pytest.raises(ValueError, match="slabs of segments and a bag are not in"):
        runner.load_kept("b", SPEC.boundary, PROMPT, run.segment_slabs, run.segments)
    plain, _ = make_runner(60, setup=replace(CALIBRATED, surrogate=None))
    with pytest.raises(ValueError, match="cannot be read here"):
        plain.load_kept("b", SPEC.boundary, PROMPT, kept, run.segments)


def test_kept_rows_that_lie_elsewhere_have_to_be_loaded() -> None:
    runner, pool = make_cutting()
    run = SegmentedRun(runner, pool, TOKENS, PROMPT, SPEC)
    run.run([PROMPT])
    work = run.next_work(1)
    first, second = run.spec.boundary_chunks, run.spec.boundary_chunks + 1
    slabs = list(work.slabs)
    slabs[first], slabs[second] = slabs[second], slabs[first]
    with pytest.raises(ValueError, match="other slabs"):
        runner.run([replace(work, slabs=slabs)])
    kept = [*run.segment_slabs, *run.slabs[run.lead + 1 :]]
    for wrong in (kept[1:], kept[:-1], kept[::-1]):
        with pytest.raises(ValueError):
            runner.load_kept("b", SPEC.boundary, PROMPT, wrong, run.segments)
    runner.load_kept("b", SPEC.boundary, PROMPT, kept, run.segments)
    assert np.isfinite(runner.run([work])[0].numpy()).all()
