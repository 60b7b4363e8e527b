"""Whole runs with eviction: against plain torch with masked columns, and against runs that are cut otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from diptych.eviction_spec import ADA, FASTGEN, KeepSpec
from engine.cpu.eviction import head_profile
from engine.cpu.eviction.head_profile import build_profile_kernel
from engine.cpu.eviction.ragged_attention import build_ragged_kernel
from engine.cpu.model_runner import CpuModelRunner
from engine.eviction.memory import eviction_bytes, query_record_bytes, remembered_bytes
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.protocols import EvictionOrder
from engine.step_work import KeptWork, StepWork
from kvcache.eviction.ada import bin_scores
from kvcache.eviction.kept_rows import KeptRows
from kvcache.eviction.policies import COMPETED, FULL, KeepRule, choose_policies, mask_without_window
from kvcache.pool import KvPool
from tests.engine.cpu.eviction.evicted_runs import (
    CONTEXT,
    FOLDER,
    SETUP,
    EvictedRun,
    make_runner,
    masked_attention,
    source_tokens,
    visible_columns,
)

PROMPT, ANSWER = 330, 200
SPEC = KeepSpec(0.9, 64, FASTGEN)
BLOCKS = [64, 64, 64, 8]
TOKENS = source_tokens(PROMPT + ANSWER)


@pytest.fixture(scope="module")
def tiny() -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def single() -> tuple[EvictedRun, torch.Tensor]:
    """A run that decodes token by token, and its logits."""
    run = EvictedRun(*make_runner(), TOKENS, PROMPT, SPEC)
    return run, run.run([PROMPT] + [1] * ANSWER)


def test_logits_are_those_of_attention_with_masked_columns(
    single: tuple[EvictedRun, torch.Tensor], tiny: Any
) -> None:
    run, logits = single
    kept = sum(report.kept_rows for report in run.reports) / sum(report.all_rows for report in run.reports)
    assert 0.1 < kept < 0.9
    with torch.no_grad(), masked_attention(tiny, visible_columns(run, len(TOKENS))) as pooled:
        expected = tiny(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-3)
    assert (tiny(torch.tensor([TOKENS])).logits[0] - expected)[PROMPT:].abs().max() > 0.1
    check_decisions(run, pooled)


def check_decisions(run: EvictedRun, pooled: list[torch.Tensor]) -> None:
    """Policies and kept rows are those of whole matrices; rows whose scores differ by rounding may change places."""
    kinds, rule = SETUP.kinds[TOKENS], KeepRule()
    first = run.maps[0]
    for number, kept in enumerate(run.maps):
        n = kept.length
        for layer, head in np.ndindex(kept.counts.shape):
            policy = int(kept.policies[layer, head])
            profiled = 64 if number else n
            rows = pooled[layer][head, n - profiled : n, :n].numpy()
            had = np.arange(n)
            if number:
                old = run.maps[number - 1]
                had = np.concatenate(
                    [np.arange(64), old.head_positions(layer, head), np.arange(old.length, n)]
                ).astype(np.int64)
            visible = np.minimum(n - had, profiled)
            scores = rows[:, had].sum(axis=0) / visible
            if number == 0:
                masses = profile_masses(rows, scores, kinds[:n], rule)
                assert abs(masses - SPEC.threshold).min() > 1e-5, (
                    "a mass that rounding decides: take another prompt"
                )
                assert policy == choose_policies(masses, SPEC.threshold, n)
            assert policy == first.policies[layer, head]
            found = kept.head_positions(layer, head)
            if policy == FULL:
                assert np.array_equal(found, had[had >= 64])
                continue
            mask = mask_without_window(policy, kinds[had], had, scores, n, PROMPT, 64, rule)
            if "local" in rule.policy_parts(policy):
                mask |= had >= n - rule.window_tokens(PROMPT, 64)
            expected = had[mask & (had >= 64)]
            assert len(found) == len(expected)
            swapped = np.setxor1d(found, expected)
            if len(swapped):
                unlike = scores[np.searchsorted(had, swapped)]
                assert np.ptp(unlike) < 1e-5 * unlike.max()


def profile_masses(rows: Any, scores: Any, kinds: Any, rule: KeepRule) -> Any:
    """Recovered mass of policies 0 to 3, from a whole matrix."""
    n, masses = rows.shape[1], np.zeros(FULL)
    for policy in range(FULL):
        mask = mask_without_window(policy, kinds, np.arange(n), scores, n, n, 64, rule)
        of_rows = list[float]()
        for number, row in enumerate(rows):
            near = np.arange(n) > n - len(rows) + number - rule.window_tokens(n, 64)
            kept = mask | near if "local" in rule.policy_parts(policy) else mask
            of_rows.append(row[kept].sum())
        masses[policy] = np.mean(of_rows)
    return masses


def test_reading_in_blocks_gives_the_same_bits_as_decoding(single: tuple[EvictedRun, torch.Tensor]) -> None:
    one, expected = single
    for counts in ([PROMPT, *BLOCKS], [PROMPT, 1, 50, 13, 63, 1, 2, 62, 8]):
        run = EvictedRun(*make_runner(), TOKENS, PROMPT, SPEC)
        assert torch.equal(run.run(counts), expected)
        same_maps(run, one)


def test_heads_of_a_layer_keep_the_fewest_rows_that_recover_the_threshold(tiny: Any) -> None:
    """As the definition says of whole matrices in float64, but for rows whose scores are nearly those of a bin's edge.

    In the answer the prompt's rows stay, and old rows of the answer compete.
    """
    spec = KeepSpec(0.8, 64, ADA)
    run = EvictedRun(*make_runner(), TOKENS, PROMPT, spec)
    run.run([PROMPT, *BLOCKS])
    with torch.no_grad(), masked_attention(tiny, visible_columns(run, PROMPT + 200)) as pooled:
        tiny(torch.tensor([TOKENS[: PROMPT + 200]]))
    for number, kept in enumerate(run.maps):
        assert (kept.policies == COMPETED).all()
        before = run.maps[number - 1] if number else None
        for layer in range(6):
            rows = pooled[layer][:, kept.length - 64 : kept.length, : kept.length].numpy()
            wanted, edge = competing_rows(rows, layer, kept, before, spec)
            for head, mask in enumerate(wanted):
                found = np.zeros(kept.length, np.bool_)
                found[kept.head_positions(layer, head)] = True
                assert not (found != mask)[~edge[head]].any(), (number, layer, head)
    assert run.reports[0].policies == {"ada": 24}
    order = EvictionOrder("b", TOKENS[:100], 100, KeepSpec(0.8), [])
    other = EvictedRun(run.runner, run.pool, TOKENS, 100, order.spec, "b")
    run.runner.run([other.next_work(100)])
    evictor = run.runner._attentions[0].evictor
    assert evictor is not None
    with pytest.raises(ValueError, match="the rows of b at 100 tokens were not marked"):
        evictor.plan_eviction(order, other.slabs)


def competing_rows(rows: Any, layer: int, kept: KeptRows, before: KeptRows | None, spec: KeepSpec) -> Any:
    """Which rows behind the boundary each head keeps, and which are near the edge of a bin, [heads, length] each."""
    heads, n = len(rows), kept.length
    shapes = (heads, n)
    stays, competes, scores = np.zeros(shapes, np.bool_), np.zeros(shapes, np.bool_), np.zeros(shapes)
    for head in range(heads):
        had = np.arange(n)
        if before is not None:
            old = before.head_positions(layer, head)
            had = np.concatenate([np.arange(64), old, np.arange(before.length, n)]).astype(np.int64)
        means = rows[head][:, had].sum(axis=0) / np.minimum(n - had, 64)
        scores[head, had] = [means[max(0, i - 3) : i + 4].max() for i in range(len(had))]
        last = 32 if before is None else 64
        first = (had < 64) if before is None else (had < PROMPT)
        stays[head, had] = first | (had >= n - last)
        competes[head, had] = ~stays[head, had]
    bins = bin_scores(scores.astype(np.float32))
    edge = competes & (bin_scores((scores * (1 + 1e-4)).astype(np.float32)) != bins)
    edge |= competes & (bin_scores((scores * (1 - 1e-4)).astype(np.float32)) != bins)
    chosen = stays.copy()
    for number in sorted(set(bins[competes].tolist()), reverse=True):
        more = chosen | (competes & (bins == number))
        if before is None:
            if sum((rows[head] * chosen[head]).sum() for head in range(heads)) >= spec.threshold * 64 * heads:
                break
        else:
            share = sum((before.head_positions(layer, head) < PROMPT).sum() for head in range(heads))
            room = share / (heads * (PROMPT - 64)) * heads * (n - 64 - PROMPT)
            if (more & competes).sum() > room + 1e-6:
                break
        chosen = more
    chosen[:, :64] = False
    return chosen, edge


@pytest.mark.parametrize("rule", [ADA, FASTGEN])
def test_steps_of_any_size_and_repeated_ones_decide_the_same(rule: str) -> None:
    spec = KeepSpec(0.8, 64, rule)
    whole, cut = (EvictedRun(*make_runner(), TOKENS, 200, spec) for _ in range(2))
    whole.run([200, 64])
    for count in (1, 63, 100, 35, 1, 64):
        work = cut.next_work(count)
        cut.runner.run([work])
        cut.runner.run([work])
        cut.finish(work)
    assert [len(one.positions) for one in cut.maps] == [len(one.positions) for one in whole.maps]
    same = [np.isin(a.positions, b.positions).mean() for a, b in zip(cut.maps, whole.maps, strict=True)]
    assert min(same) > 0.99


def test_a_prompt_whose_rows_were_not_all_computed_is_not_profiled() -> None:
    run = EvictedRun(*make_runner(), TOKENS, 200, KeepSpec(0.8, 64, FASTGEN))
    order = EvictionOrder("a", TOKENS[:200], 200, run.spec, list(run.slabs))
    run.computed = 64
    run.runner.run([run.next_work(136)])
    with pytest.raises(ValueError, match="needs the attention of position 0 of a"):
        run.runner.plan_eviction(order)


def same_maps(one: EvictedRun, other: EvictedRun) -> None:
    assert [kept.encode() for kept in one.maps] == [kept.encode() for kept in other.maps]


def test_chunked_prefill_and_repeated_batches_decide_the_same(
    single: tuple[EvictedRun, torch.Tensor],
) -> None:
    one, expected = single
    run = EvictedRun(*make_runner(), TOKENS, PROMPT, SPEC)
    for count in (64, 230, 20, 16):
        work = run.next_work(count)
        again = [run.runner.run([work])[0] for _ in range(2)]
        assert torch.equal(*again)
        run.finish(work)
    same = run.run([10, 54])
    torch.testing.assert_close(same, expected[PROMPT : PROMPT + 64], rtol=0, atol=2e-3)
    assert [kept.encode() for kept in run.maps] == [kept.encode() for kept in one.maps[:2]]


def test_a_step_mixes_ordinary_and_ragged_rows_and_pools(single: tuple[EvictedRun, torch.Tensor]) -> None:
    one, expected = single
    files = Checkpoint.resolve(str(FOLDER))
    codec, calibration = resolve_kv_codec(files, "int8")
    coded = KvPool(files.layout(codec=codec), 4)
    raw = KvPool(files.layout(), 60, first=4)
    runner = CpuModelRunner.load(files, coded, CONTEXT, calibration, others=[(raw, None)], eviction=SETUP)
    run = EvictedRun(runner, raw, TOKENS, PROMPT, SPEC)
    other = EvictedRun(runner, raw, TOKENS[::-1], 100, KeepSpec(0.5, 0, FASTGEN), "b")
    slabs = raw.take_slabs(2, "c")
    ordinary = [
        StepWork(TOKENS[:70], 0, [0, 1], "all", TOKENS[0]),
        StepWork(TOKENS[:70], 0, slabs, "all", TOKENS[0]),
        StepWork(TOKENS[70:71], 70, slabs, "last", TOKENS[0]),
    ]
    alone = [runner.run([work])[0].clone() for work in ordinary]
    found = list[torch.Tensor]()
    beside = other.run([100, 1])
    for count in (PROMPT, *BLOCKS):
        first, second = run.next_work(count), other.next_work(9)
        results = runner.run([ordinary[0], first, ordinary[1], second])
        assert torch.equal(results[0], alone[0]) and torch.equal(results[2], alone[1])
        results += runner.run([ordinary[2], second])
        assert torch.equal(results[4], alone[2]) and torch.equal(results[3], results[5])
        found.append(results[1])
        beside = torch.cat([beside, results[3]])
        run.finish(first)
        other.finish(second)
    assert torch.equal(torch.cat(found), expected)
    same_maps(run, one)
    undisturbed = EvictedRun(*make_runner(), TOKENS[::-1], 100, KeepSpec(0.5, 0, FASTGEN))
    assert torch.equal(undisturbed.run([100, 46]), beside)


def test_a_bag_that_was_moved_goes_on(single: tuple[EvictedRun, torch.Tensor]) -> None:
    _, expected = single
    here = EvictedRun(*make_runner(), TOKENS, PROMPT, SPEC)
    here.run([PROMPT, 64])
    there = EvictedRun(*make_runner(50, first=7), TOKENS, PROMPT, SPEC)
    there.pool.give_back(there.slabs, "a")
    there.slabs = there.pool.take_slabs(len(here.slabs), "a")[::-1]
    for source, target in zip(here.slabs, there.slabs, strict=True):
        there.pool.slab_bytes(target)[:] = here.pool.slab_bytes(source)
    there.runner.load_kept("a", SPEC.boundary, PROMPT + 64, there.slabs[2:])
    there.computed, there.evicted, there.maps = here.computed, True, here.maps[:]
    assert torch.equal(there.run([64, 64, 7]), expected[PROMPT + 64 : -1])
    there.runner.forget_kept("a")
    with pytest.raises(ValueError, match="kept rows of a are unknown"):
        there.run([1])


def test_nothing_changes_without_kept_works() -> None:
    plain, evicting = make_runner(setup=None)[0], make_runner()[0]
    works = [StepWork(TOKENS[:100], 0, [1, 2], "all"), StepWork(TOKENS[:5], 0, [3], "all")]
    for first, second in zip(plain.run(works), evicting.run(works), strict=True):
        assert torch.equal(first, second)


def test_short_prompts_keep_everything_and_boundaries_may_be_whole_prompts() -> None:
    short = EvictedRun(*make_runner(), TOKENS, 9, KeepSpec(0.5, 0, FASTGEN))
    short.run([9, 64])
    assert short.reports[0].policies == {"full": 24} and short.reports[1].kept_rows == 24 * 73
    whole = EvictedRun(*make_runner(), TOKENS, 128, KeepSpec(0.5, 128, FASTGEN))
    whole.run([128, 64, 3])
    assert whole.reports[0].all_rows == 0 and whole.reports[0].bag_slabs == 1
    assert whole.reports[1].all_rows == 24 * 64


def test_a_map_of_another_decision_is_not_loaded() -> None:
    """A bag that is right by itself, but was decided with another boundary, or 64 tokens earlier."""
    run = EvictedRun(*make_runner(), TOKENS, 100, KeepSpec(0.9, 64))
    run.run([100])
    bag = run.slabs[2:]
    for boundary, length in ((0, 100), (64, 164), (64, 36)):
        with pytest.raises(ValueError, match=f"100 tokens from 64 on, not of {length} from {boundary} on"):
            run.runner.load_kept("b", boundary, length, bag)
    run.runner.load_kept("b", 64, 100, bag)


def test_warming_up_compiles_the_kernels_of_evictions_and_leaves_nothing() -> None:
    runner, pool = make_runner(4)
    runner.warm()
    evictor = runner._attentions[0].evictor
    assert evictor is not None and evictor.recorded_bytes == 0 and pool.free == 4
    kernels = [build_ragged_kernel(32), build_profile_kernel(32)]
    kernels += [head_profile._sum_columns, head_profile._sum_near_columns]
    assert all(kernel.signatures for kernel in kernels)  # type: ignore[attr-defined]


def test_recorded_queries_take_what_is_announced() -> None:
    run = EvictedRun(*make_runner(), TOKENS, PROMPT, SPEC)
    evictor = run.runner._attentions[0].evictor
    assert evictor is not None and evictor.recorded_bytes == 0
    run.run([200])
    queries = query_record_bytes(run.pool.layout, 8)
    assert queries == 6 * 64 * 8 * 32 * 4
    assert evictor.recorded_bytes == 24 * 2 * PROMPT * 4, "sums of all rows"
    run.run([PROMPT - 200, 1])
    assert evictor.recorded_bytes == queries
    assert evictor.recorded_bytes < evictor.held_bytes <= eviction_bytes(run.pool.layout, 8, len(TOKENS), 1)
    run.runner.forget_kept("a")
    run.runner.forget_kept("a")
    assert evictor.recorded_bytes == 0


@pytest.mark.parametrize("prompt", [64, 330])
@pytest.mark.parametrize("rule", [ADA, FASTGEN])
def test_a_decision_takes_no_more_than_is_planned(prompt: int, rule: str) -> None:
    """Of heads that keep nearly everything, and for one sequence at a time."""
    runner, pool = make_runner()
    evictor = runner._attentions[0].evictor
    assert evictor is not None
    for count, key in enumerate("ab", 1):
        run = EvictedRun(runner, pool, TOKENS, prompt, KeepSpec(1 - 1e-9, 0, rule), key)
        runner.run([run.next_work(prompt)])
        order = EvictionOrder(key, TOKENS[:prompt], prompt, run.spec, list(run.slabs))
        assert 0.99 * 24 * prompt < runner.plan_eviction(order).kept_rows <= 24 * prompt
        planned = eviction_bytes(pool.layout, 8, prompt, count)
        assert 0.2 * planned < evictor.held_bytes <= planned
    runner.forget_kept("a")
    runner.apply_eviction("b", pool.take_slabs(runner.plan_eviction(order).bag_slabs, "b"))
    assert evictor.held_bytes <= remembered_bytes(pool.layout, 8, prompt)
    runner.forget_kept("b")
    assert evictor.held_bytes == 0


def test_what_does_not_fit_is_refused() -> None:
    runner, pool = make_runner()
    order = EvictionOrder("a", TOKENS[:100], 100, KeepSpec(0.9, 64), [0, 1])
    with pytest.raises(ValueError, match="nothing of a was recorded"):
        runner.plan_eviction(order)
    with pytest.raises(ValueError, match="no eviction of a was planned"):
        runner.apply_eviction("a", [1])
    with pytest.raises(ValueError, match="no map of kept rows"):
        pool.data[3].zero_()
        runner.load_kept("a", 0, 100, [3])
    with pytest.raises(ValueError, match="not all in a pool"):
        runner.load_kept("a", 0, 100, [60])
    run = EvictedRun(runner, pool, TOKENS, 100, KeepSpec(0.9, 64))
    run.run([50])
    runner.run([run.next_work(40)])
    with pytest.raises(ValueError, match="needs the queries of position 90"):
        runner.plan_eviction(order)
    with pytest.raises(ValueError, match="nothing is evicted at 90 tokens"):
        runner.plan_eviction(EvictionOrder("a", TOKENS[:90], 100, KeepSpec(0.9, 64), [0, 1]))
    run.run([50, 1])
    with pytest.raises(ValueError, match="nothing is evicted at 101 tokens"):
        runner.plan_eviction(EvictionOrder("a", TOKENS[:101], 100, KeepSpec(0.9, 64), run.slabs))
    work = run.next_work(1)
    for spec, slabs, error in (
        (KeepSpec(0.9, 0), run.slabs, "not of 100 from 0 on"),
        (run.spec, [*run.slabs, 59], "in other slabs"),
    ):
        with pytest.raises(ValueError, match=error):
            runner.run([StepWork(work.tokens, 101, slabs, "last", 7, KeptWork("a", 100, spec, True))])
    other = EvictedRun(runner, pool, TOKENS, 70, KeepSpec(0.9, 64), "b")
    runner.run([other.next_work(70)])
    planned = runner.plan_eviction(EvictionOrder("b", TOKENS[:70], 70, KeepSpec(0.9, 64), other.slabs))
    assert planned.bag_slabs == 1
    with pytest.raises(ValueError, match="need 1 slabs, not 2"):
        runner.apply_eviction("b", [5, 6])
    plain, _ = make_runner(setup=None)
    with pytest.raises(ValueError, match="nothing is evicted"):
        plain.plan_eviction(order)
    with pytest.raises(ValueError, match="nothing is evicted from this pool"):
        plain.run([StepWork([5], 0, [0], "last", 5, KeptWork("a", 100, SPEC, False))])
    plain.forget_kept("a")


def test_maps_are_those_of_the_layout() -> None:
    run = EvictedRun(*make_runner(), TOKENS, 200, KeepSpec(0.8, 64))
    run.run([200])
    kept: KeptRows = run.maps[0]
    assert kept.boundary == 64 and kept.length == 200 and kept.num_rows == run.reports[0].kept_rows
    assert sum(run.reports[0].policies.values()) == 24 and run.reports[0].all_rows == 24 * 136
