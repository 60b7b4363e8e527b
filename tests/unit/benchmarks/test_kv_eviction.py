"""The quality benchmark of eviction measures what it says, on the embedded model's own queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from benchmarks.keep_simulation import (
    AnswerRecord,
    Bools,
    CompetingKeeper,
    FixedKeeper,
    HeadBlock,
    Install,
    Keeper,
    PolicyKeeper,
    Prompt,
    SurrogateKeeper,
    compute_answer,
    compute_prompt,
    keep_heavy,
    keep_sinks,
    keep_window,
    last_attention,
    profile_prompt,
)
from benchmarks.kept_policies import measure_same
from benchmarks.kv_eviction import (
    EVERYTHING,
    RIVALS,
    RULE,
    THRESHOLDS,
    EvictionRun,
    Passage,
    Surrogate,
    is_no_worse,
    measure_freed,
    recall_passage,
    summarize_run,
    summarize_zap,
)
from benchmarks.kv_quality import FOLDER
from diptych.eviction_spec import ADA, FASTGEN, KEEP_RULES, ZAP, KeepSpec
from engine.calibration.keep_fit import own_attention
from engine.model.calibration_file import load_surrogate
from engine.model.checkpoint import Checkpoint
from engine.model.rope import rope_frequencies
from kvcache.eviction.policies import FULL, PUNCT_KIND
from models.recall import RecallSeries
from tests.engine.cpu.eviction.evicted_runs import SETUP, EvictedRun, make_runner, source_tokens
from tests.unit.kvcache.eviction import keep_oracle

PROMPT, ANSWER = 80, 70


@pytest.fixture(scope="module")
def tiny() -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(300, 4096, (PROMPT + ANSWER,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def kinds() -> NDArray[np.uint8]:
    return np.where(np.arange(4096) % 4, 0, PUNCT_KIND).astype(np.uint8)


@pytest.fixture(scope="module")
def install(tiny: Any) -> Install:
    return partial(own_attention, tiny)


@pytest.fixture(scope="module")
def prompt(tiny: Any, ids: torch.Tensor, kinds: NDArray[np.uint8], install: Install) -> Prompt:
    return compute_prompt(tiny, ids[:PROMPT], kinds[ids.numpy()], install)


def answer_of(
    tiny: Any, prompt: Prompt, ids: torch.Tensor, keeper: Keeper | None, install: Install
) -> AnswerRecord:
    return compute_answer(tiny, prompt, ids[PROMPT:], keeper, install)


@torch.no_grad()
def test_an_answer_that_keeps_everything_is_the_models(
    tiny: Any, ids: torch.Tensor, prompt: Prompt, install: Install
) -> None:
    expected = tiny(ids[None], use_cache=False).logits[0, PROMPT - 1 : -1]
    record = answer_of(tiny, prompt, ids, None, install)
    assert torch.allclose(record.logits, expected, atol=2e-3)
    assert all(torch.allclose(masses, torch.ones(())) for masses in record.masses)
    keeper = PolicyKeeper(prompt, profile_prompt(prompt, 0, RULE), KeepSpec(1.0), RULE)
    assert (keeper.policies == FULL).all()
    same = answer_of(tiny, prompt, ids, keeper, install)
    assert torch.equal(same.logits, record.logits) and same.kept == [24 * PROMPT, 24 * (PROMPT + 64)]


def test_profiles_of_real_heads_are_those_of_the_definitions(prompt: Prompt) -> None:
    """One head of every layer: masses, policies and what is kept, number by number."""
    profile, kinds = profile_prompt(prompt, 0, RULE), dict(enumerate(prompt.kinds[:PROMPT].tolist()))
    keepers = [PolicyKeeper(prompt, profile, KeepSpec(threshold), RULE) for threshold in THRESHOLDS]
    for layer in range(len(prompt.keys)):
        head = layer % len(prompt.keys[layer])
        queries = prompt.queries[layer][head].transpose(0, 1).tolist()
        rows = keep_oracle.attention_rows(queries, prompt.keys[layer][head].tolist())
        masses = [keep_oracle.recovered_mass(rows, kinds, keep_oracle.PAPER[: p + 1], 0) for p in range(FULL)]
        assert profile.masses[layer, head] == pytest.approx(masses, abs=1e-9)
        scores = keep_oracle.mean_attention(rows)
        for keeper, threshold in zip(keepers, THRESHOLDS, strict=True):
            policy = keep_oracle.choose_policy(masses, threshold)
            assert keeper.policies[layer, head] == policy
            expected = keep_oracle.kept_positions(
                keep_oracle.PAPER[: policy + 1], kinds, scores, PROMPT, PROMPT, 0
            )
            found = {*np.flatnonzero(keeper.keep_of_prompt(layer)[head]).tolist()}
            assert found == (expected if policy < FULL else {*kinds})


class RememberingKeeper:
    """Remembers what another one keeps at the prompt's end and at each block: positions by layer and head."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.kept = dict[tuple[int, int], list[set[int]]]()

    def keep_of_prompt(self, layer: int) -> list[Bools]:
        masks = self._keeper.keep_of_prompt(layer)
        for head, mask in enumerate(masks):
            self.kept[layer, head] = [{*np.flatnonzero(mask).tolist()}]
        return masks

    def keep_at_block(self, layer: int, blocks: Sequence[HeadBlock]) -> list[Bools]:
        masks = self._keeper.keep_at_block(layer, blocks)
        for head, (block, mask) in enumerate(zip(blocks, masks, strict=True)):
            self.kept[layer, head].append({*block.rows[mask].tolist()})
        return masks


@pytest.fixture(scope="module")
def surrogate() -> Surrogate:
    """That of the embedded model."""
    checkpoint = Checkpoint.resolve(str(FOLDER))
    weights, config = load_surrogate(checkpoint), checkpoint.config
    assert weights is not None
    return Surrogate(weights, rope_frequencies(config.rope, config.head_dim).double().numpy())


@pytest.mark.parametrize("threshold", [0.95, 0.75])
@pytest.mark.parametrize("rule", KEEP_RULES)
def test_the_engine_keeps_what_the_simulation_keeps(
    tiny: Any, install: Install, surrogate: Surrogate, rule: str, threshold: float
) -> None:
    """Three decisions over source text, in all heads; a row may be another one where rounding decides."""
    tokens, length, spec = source_tokens(400 + 140), 400, KeepSpec(threshold, rule=rule)
    ids, kinds = torch.tensor(tokens), SETUP.kinds[tokens]
    prompt = compute_prompt(tiny, ids[:length], kinds, install)
    profile = profile_prompt(prompt, 0, RULE)
    assert abs(profile.masses - threshold).min() > 1e-5, "a mass that rounding decides: take another prompt"
    keepers: dict[str, Keeper] = {
        ADA: CompetingKeeper(prompt, profile.last, spec),
        FASTGEN: PolicyKeeper(prompt, profile, spec, RULE),
        ZAP: SurrogateKeeper(prompt, surrogate.weights, surrogate.frequencies, spec),
    }
    keeper = RememberingKeeper(keepers[rule])
    compute_answer(tiny, prompt, ids[length:], keeper, install)
    setup = replace(SETUP, surrogate=surrogate.weights)
    run = EvictedRun(*make_runner(setup=setup), tokens, length, spec)
    run.run([length, 64, 64])
    assert len(run.maps) == 3
    for number, kept in enumerate(run.maps):
        for (layer, head), simulated in keeper.kept.items():
            found = {*kept.head_positions(layer, head).tolist()}
            assert len(found ^ simulated[number]) <= 2 + 0.01 * len(found), (number, layer, head)


class RecordingKeeper:
    """Keeps some rows, and remembers what it was asked."""

    def __init__(self, kept: Bools) -> None:
        self._kept = kept
        self.asked = dict[int, Sequence[HeadBlock]]()

    def keep_of_prompt(self, layer: int) -> list[Bools]:
        return [self._kept[:PROMPT]] * 4

    def keep_at_block(self, layer: int, blocks: Sequence[HeadBlock]) -> list[Bools]:
        self.asked[layer] = blocks
        return [self._kept[one.rows] for one in blocks]


def test_an_answer_sees_what_is_kept_and_its_own_block(
    tiny: Any, ids: torch.Tensor, prompt: Prompt, install: Install
) -> None:
    """The values of dropped rows may be any: nothing reads them."""
    kept = np.arange(PROMPT + ANSWER) % 3 == 0
    keeper = RecordingKeeper(kept)
    record = answer_of(tiny, prompt, ids, keeper, install)
    block = keeper.asked[5][3]
    rows, attention = block.rows, block.attention
    expected = [*np.flatnonzero(kept[:PROMPT]), *range(PROMPT, PROMPT + 64)]
    assert rows.tolist() == expected and attention.shape == (64, len(expected))
    assert attention.sum(axis=1) == pytest.approx(1) and not np.triu(attention[:, -64:], 1).any()
    assert record.kept == [24 * kept[:PROMPT].sum(), 24 * kept[: PROMPT + 64].sum()]
    assert (record.masses[2] < 1).all()
    dropped = torch.from_numpy(~kept[:PROMPT])
    others = [values.masked_fill(dropped[:, None], 9.0) for values in prompt.values]
    changed = Prompt(prompt.ids, prompt.kinds, prompt.queries, prompt.keys, others, prompt.logits)
    again = answer_of(tiny, changed, ids, RecordingKeeper(kept), install)
    assert torch.equal(again.logits, record.logits)


def test_fixed_policies_keep_as_many_rows_as_they_are_given() -> None:
    rows = np.array([0, 1, 2, 3, 10, 20, 30, 40, 50, 60])
    sums = np.array([1.0, 2, 0, 0, 9, 8, 0, 7, 0, 0])
    assert np.flatnonzero(keep_window(rows, sums, 3)).tolist() == [7, 8, 9]
    assert np.flatnonzero(keep_sinks(rows, sums, 6)).tolist() == [0, 1, 2, 3, 8, 9]
    assert np.flatnonzero(keep_heavy(rows, sums, 5)).tolist() == [4, 5, 7, 8, 9]
    assert all(choose(rows, sums, 10).all() for choose in (keep_window, keep_sinks, keep_heavy))


def test_heavy_hitters_are_counted_over_the_last_rows_and_go_on_in_the_answer(
    tiny: Any, ids: torch.Tensor, prompt: Prompt, install: Install
) -> None:
    last = last_attention(prompt)
    sums = [[rows.sum(axis=0) for rows in heads] for heads in last]
    assert [one.sum() for one in sums[4]] == pytest.approx([64] * 4)
    keeper = FixedKeeper(prompt, keep_heavy, [40, 60], sums)
    record = answer_of(tiny, prompt, ids, keeper, install)
    assert record.kept == [24 * 40, 24 * 60]


def test_figures_of_a_run(
    tiny: Any, ids: torch.Tensor, kinds: NDArray[np.uint8], surrogate: Surrogate
) -> None:
    """Less is kept at lower thresholds, the guarantee holds, and answers count as the model gives them."""
    text, tables = (EvictionRun(tiny, kinds, surrogate) for _ in range(2))
    text.add_passage(Passage(ids[:PROMPT], ids[PROMPT:]))
    greedy = ids[:PROMPT].tolist()
    for _ in range(6):
        with torch.no_grad():
            greedy.append(int(tiny(torch.tensor([greedy])).logits[0, -1].argmax()))
    wrong = [*greedy[:-1], greedy[-1] ^ 1]
    for series in (RecallSeries(greedy, [(80, 83), (84, 86)]), RecallSeries(wrong, [(80, 83), (84, 86)])):
        tables.add_passage(recall_passage(series))
    figures = summarize_run(text, tables)
    assert figures["recall_of_everything"] == {"right_pct": 75.0, "first_pct": 100.0, "later_pct": 50.0}
    for rule in KEEP_RULES:
        rows = [*figures[rule]["thresholds"].values()]
        pruned = [row["pruned_pct"] for row in rows]
        assert pruned == sorted(pruned) and pruned[-1] > 0, rule
    assert all({*row["rivals"]} == {*RIVALS} for row in figures[ADA]["thresholds"].values())
    for threshold, row in figures[FASTGEN]["thresholds"].items():
        assert row["prompt_mass_min"] >= float(threshold)
        assert sum(row["heads_pct"].values()) == pytest.approx(100, abs=0.3)
    exact, row = text.tallies[EVERYTHING, 1.0].losses, figures[ZAP]["thresholds"]["0.75"]
    assert row["loss"]["nats"] == pytest.approx(text.tallies[ZAP, 0.75].losses[0] - exact[0], abs=1e-5)
    assert 0 <= figures[ZAP]["zap_recall"] <= 1.34 and 0 < figures[ZAP]["zap_kept"] <= 1


def test_recall_of_zap_is_that_where_few_enough_rows_are_kept() -> None:
    rows = {
        str(one): {
            "pruned_pct": kept,
            "tables": {"pruned_pct": kept + 5},
            "recall": {"right_pct": 90},
            "loss": {"nats": 0.1},
        }
        for one, kept in ((0.98, 40.0), (0.95, 56.0), (0.9, 70.0))
    }
    found = summarize_zap(rows, 95)
    assert (found["zap_threshold"], found["zap_kept"], found["zap_recall"]) == (0.95, 0.44, 0.9474)


def test_policies_of_the_engine_are_those_of_float64(
    tiny: Any, kinds: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.kept_policies.TOKENS", 256)
    assert measure_same(FOLDER, tiny, kinds, source_tokens(1500), count=5) == 1.0


def test_no_worse_means_in_loss_and_in_recall() -> None:
    def row(nats: float, right: float) -> dict[str, Any]:
        return {"loss": {"nats": nats}, "recall": {"right_pct": right}}

    rivals = [row(0.2, 90), row(0.1, 50)]
    assert is_no_worse(row(0.1, 90), rivals)
    assert not is_no_worse(row(0.11, 95), rivals) and not is_no_worse(row(0.0, 89), rivals)
    assert is_no_worse({"loss": {"nats": 0.1}}, [{"loss": {"nats": 0.1}}])


def test_freed_bytes_are_those_of_whole_slabs(
    tiny: Any, ids: torch.Tensor, kinds: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A threshold near 0 leaves the first and the last tokens: a bag of one slab."""
    monkeypatch.setattr("benchmarks.kv_eviction.FREED_LENGTHS", (130,))
    found = measure_freed(tiny, kinds, ids.tolist(), 1e-30)
    assert found["keep_freed_ratio"] == pytest.approx((3 - 1) * 64 / (130 - 36), abs=2e-3)
