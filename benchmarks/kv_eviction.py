"""What eviction costs and saves on the embedded model: the part `eviction` of `benchmarks.kv_quality`.

A prompt is followed by the true tokens of its answer. Prompts are held-out text, which 96 tokens follow, and tables
with questions (`models/recall.py`); the first question ends the prompt, the others come with the answer. Rivals keep as
many rows as `ada` does at the same places, but equally many in every head: the last rows (`window`), the first four and
the last (`sink + window`), or half the last and half those with most attention (`heavy hitter`), counted over the same
64 rows of the prompt that `ada` sees.

    pruned_pct          rows that heads do not keep at the prompt's end, of all layers and heads
    answer_mass         attention of the answer that falls on kept rows, mean of heads; `query_head_mass_min`: the mean
                        of the worst query head
    heads_pct           `fastgen`: how many percent of heads chose each policy; `prompt_mass_min`: the mass that a head
                        recovers of the prompt's rows, of the worst head of all prompts
    loss                nats per token more than with everything, with the 95 % interval over prompts (bootstrap, pairs)
    recall              percent of questions that are answered exactly: the first ones, and the later ones
    beats_fixed         at how many thresholds neither loss nor recall is worse than the best rival's
    zap_recall          recall of `zap` over that of exact KV, at the largest threshold at which `zap_kept` is at most
                        0.45: the share of rows that stay of text or of tables, the larger one; `zap_loss`: its loss
    same                `fastgen`: the share of 50 prompts of which the engine's policies are those of float64
    freed               `ada`: bytes that the pool gets back at the prompt's end, over bytes of pruned rows, prompts of
                        1,000 to 1,900 tokens; the slab for the next 64 tokens is not counted, since any sequence needs
                        one
    with_codec          losses of a codec, of a threshold (`ada`), and of both together; whether the last exceeds the
                        sum of the others by more than a tenth
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.keep_simulation import (
    FIXED_POLICIES,
    AnswerRecord,
    CompetingKeeper,
    FixedKeeper,
    Install,
    Keeper,
    PolicyKeeper,
    Prompt,
    PromptProfile,
    SurrogateKeeper,
    compute_answer,
    compute_prompt,
    last_attention,
    profile_prompt,
)
from diptych.eviction_spec import ADA, FASTGEN, KEEP_RULES, ZAP, KeepSpec
from engine.calibration.keep_fit import own_attention
from engine.calibration.kv_quality import (
    NUM_RESAMPLES,
    Attend,
    CodingScheme,
    build_scheme,
    coded_attention,
    complete_id,
)
from kvcache.codecs.calibration import Calibration
from kvcache.eviction.kept_rows import KeptRows
from kvcache.eviction.policies import COMPETED, PUNCT_KIND, KeepRule
from kvcache.eviction.zap import KeepSurrogate
from kvcache.layout import KvLayout
from models.recall import RecallSeries

EVERYTHING = "everything"
RIVALS = tuple(FIXED_POLICIES)
THRESHOLDS = (0.98, 0.95, 0.91, 0.85, 0.75)
# `zap` counts the attention of a repetition, which is spread more evenly than that of other text.
RULE_THRESHOLDS = {ADA: THRESHOLDS, FASTGEN: THRESHOLDS, ZAP: (0.75, 0.6, 0.5, 0.4, 0.3)}
ANSWER_TOKENS = 96
FREED_LENGTHS = (1000, 1225, 1450, 1675, 1900)
# The codec and the threshold that are measured together.
CODEC, COMBINED = "nuq4-1%", 0.95
RULE = KeepRule()
# The share of rows that `zap` may keep where its recall is told.
MOST_KEPT = 0.45
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt and the true tokens after it; `answers` are ranges of the latter that are answers to questions."""

    prompt: torch.Tensor
    answer: torch.Tensor
    answers: tuple[tuple[int, int], ...] = ()


def text_passage(window: torch.Tensor) -> Passage:
    """The last 96 tokens of a window are the answer."""
    return Passage(window[:-ANSWER_TOKENS], window[-ANSWER_TOKENS:])


def recall_passage(series: RecallSeries) -> Passage:
    """Everything behind the first question is the answer."""
    ids, start = torch.tensor(series.ids), series.answers[0][0]
    return Passage(ids[:start], ids[start:], tuple((a - start, b - start) for a, b in series.answers))


@dataclass(slots=True)
class Tally:
    """What one way of keeping rows did over all passages."""

    losses: list[float] = field(default_factory=list)
    first: list[bool] = field(default_factory=list)
    later: list[bool] = field(default_factory=list)
    prompt_mass: list[float] = field(default_factory=list)
    masses: list[NDArray[np.float32]] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    policies: Counter[int] = field(default_factory=Counter)

    def add_answer(self, passage: Passage, record: AnswerRecord) -> None:
        """Counts an answer: its loss, or which questions it answers."""
        if passage.answers:
            right = record.logits.argmax(-1) == passage.answer
            found = [bool(right[start:stop].all()) for start, stop in passage.answers]
            self.first.append(found[0])
            self.later += found[1:]
        else:
            self.losses.append(torch.nn.functional.cross_entropy(record.logits, passage.answer).item())

    def add_kept(self, keeper: Keeper, record: AnswerRecord, prompt: Prompt) -> None:
        """Counts what heads kept, and what those of `fastgen` chose and recovered."""
        self.masses.append(torch.stack(record.masses).mean(dim=-1).numpy())
        self.kept.append(record.kept[0] / (prompt.num_heads * len(prompt.ids)))
        if isinstance(keeper, PolicyKeeper):
            self.prompt_mass.append(float(keeper.recovered().min()))
            self.policies.update(keeper.policies.reshape(-1).tolist())

    def recall(self) -> dict[str, float]:
        """Percent of questions that were answered exactly."""
        every = self.first + self.later
        return {
            name: round(100 * sum(some) / len(some), 2)
            for name, some in (("right_pct", every), ("first_pct", self.first), ("later_pct", self.later))
        }

    def describe_kept(self) -> dict[str, Any]:
        """What heads kept and recovered, and the policies that they chose, if there are any."""
        masses, heads = np.stack(self.masses), sum(self.policies.values())
        found: dict[str, Any] = {
            "pruned_pct": round(100 * (1 - float(np.mean(self.kept))), 2),
            "answer_mass": round(float(masses.mean()), 4),
            "answer_mass_worst_prompt": round(float(masses.mean(axis=(1, 2, 3)).min()), 4),
            "query_head_mass_min": round(float(masses.mean(axis=0).min()), 4),
        }
        if heads:
            found["prompt_mass_min"] = round(min(self.prompt_mass), 4)
            found["heads_pct"] = {
                name: round(100 * self.policies[policy] / heads, 1)
                for policy, name in enumerate(RULE.policy_names)
            }
        return found


def loss_difference(some: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """Nats per token more, with the 95 % interval: prompts are drawn again, each with both of its losses."""
    more = np.array(some) - np.array(others)
    drawn = np.random.default_rng(0).integers(len(more), size=(NUM_RESAMPLES, len(more)))
    low, high = np.quantile(more[drawn].mean(axis=1), [0.025, 0.975])
    return {"nats": round(float(more.mean()), 5), "interval": (round(float(low), 5), round(float(high), 5))}


@dataclass(frozen=True, slots=True)
class Surrogate:
    """What `zap` needs of a model: its weights, and the frequencies of the model's rotation."""

    weights: KeepSurrogate
    frequencies: NDArray[np.float64]


class EvictionRun:
    """All ways of keeping rows, over passages one by one.

    Args:
        model: of transformers.
        kinds: the kind of each token of the vocabulary.
        surrogate: for `zap`.
    """

    def __init__(self, model: Any, kinds: NDArray[np.uint8], surrogate: Surrogate) -> None:
        self._model, self._kinds, self._surrogate = model, kinds, surrogate
        self._install: Install = partial(own_attention, model)
        self.tallies: dict[tuple[str, float], Tally] = {}

    def add_passage(self, passage: Passage) -> None:
        """Computes a passage in all ways."""
        tokens = passage_kinds(passage, self._kinds)
        prompt = compute_prompt(self._model, passage.prompt, tokens, self._install)
        profile = profile_prompt(prompt, 0, RULE)
        last = [[rows.sum(axis=0) for rows in heads] for heads in profile.last]
        self._answer(passage, prompt, None, EVERYTHING, 1.0)
        for rule, thresholds in RULE_THRESHOLDS.items():
            for threshold in thresholds:
                keeper = self._make_keeper(prompt, profile, KeepSpec(threshold, rule=rule))
                record = self._answer(passage, prompt, keeper, rule, threshold)
                self.tallies[rule, threshold].add_kept(keeper, record, prompt)
                counts = [-(-rows // prompt.num_heads) for rows in record.kept]
                for rival, choose in FIXED_POLICIES.items() if rule == ADA else ():
                    fixed = FixedKeeper(prompt, choose, counts, last)
                    self._answer(passage, prompt, fixed, rival, threshold)

    def _make_keeper(self, prompt: Prompt, profile: PromptProfile, spec: KeepSpec) -> Keeper:
        surrogate = self._surrogate
        if spec.rule == ADA:
            return CompetingKeeper(prompt, profile.last, spec)
        if spec.rule == FASTGEN:
            return PolicyKeeper(prompt, profile, spec, RULE)
        return SurrogateKeeper(prompt, surrogate.weights, surrogate.frequencies, spec)

    def _answer(
        self, passage: Passage, prompt: Prompt, keeper: Keeper | None, name: str, threshold: float
    ) -> AnswerRecord:
        record = compute_answer(self._model, prompt, passage.answer, keeper, self._install)
        self.tallies.setdefault((name, threshold), Tally()).add_answer(passage, record)
        return record


def passage_kinds(passage: Passage, kinds: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The kinds of all tokens of a passage."""
    found: NDArray[np.uint8] = kinds[torch.cat((passage.prompt, passage.answer)).numpy()]
    return found


def summarize_run(text: EvictionRun, tables: EvictionRun | None) -> dict[str, Any]:
    """The figures of all rules, and at how many thresholds `ada` is no worse than the best rival."""
    exact = text.tallies[EVERYTHING, 1.0].losses

    def figures_of(name: str, threshold: float) -> dict[str, Any]:
        found: dict[str, Any] = {"loss": loss_difference(text.tallies[name, threshold].losses, exact)}
        if tables is not None:
            found["recall"] = tables.tallies[name, threshold].recall()
        return found

    figures: dict[str, Any] = {rule: {} for rule in KEEP_RULES}
    for rule, threshold in [(rule, one) for rule, every in RULE_THRESHOLDS.items() for one in every]:
        row = figures_of(rule, threshold) | text.tallies[rule, threshold].describe_kept()
        if tables is not None:
            row["tables"] = tables.tallies[rule, threshold].describe_kept()
        figures[rule].setdefault("thresholds", {})[str(threshold)] = row
    beaten = 0
    for threshold, row in figures[ADA]["thresholds"].items():
        row["rivals"] = {rival: figures_of(rival, float(threshold)) for rival in RIVALS}
        beaten += is_no_worse(row, [*row["rivals"].values()])
    figures[ADA]["beats_fixed"] = beaten
    if tables is not None:
        figures["recall_of_everything"] = tables.tallies[EVERYTHING, 1.0].recall()
        figures[ZAP] |= summarize_zap(
            figures[ZAP]["thresholds"], figures["recall_of_everything"]["right_pct"]
        )
    return figures


def summarize_zap(rows: Mapping[str, Mapping[str, Any]], exact_pct: float) -> dict[str, Any]:
    """`zap_recall`, `zap_kept` and `zap_loss` at the largest threshold that keeps few enough rows; else at the least.

    Args:
        rows: by threshold, the largest first.
        exact_pct: recall of exact KV.
    """
    kept = {
        threshold: 1 - min(row["pruned_pct"], row["tables"]["pruned_pct"]) / 100
        for threshold, row in rows.items()
    }
    chosen = next((one for one, share in kept.items() if share <= MOST_KEPT), [*kept][-1])
    row = rows[chosen]
    return {
        "zap_threshold": float(chosen),
        "zap_recall": round(row["recall"]["right_pct"] / exact_pct, 4),
        "zap_kept": round(kept[chosen], 4),
        "zap_loss": row["loss"]["nats"],
    }


def is_no_worse(row: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]]) -> bool:
    """Whether neither loss nor recall (if it was measured) is worse than the best rival's."""
    loss = row["loss"]["nats"] <= min(one["loss"]["nats"] for one in rivals)
    return loss and (
        "recall" not in row or row["recall"]["right_pct"] >= max(one["recall"]["right_pct"] for one in rivals)
    )


def measure_freed(
    model: Any, kinds: NDArray[np.uint8], stream: Sequence[int], threshold: float
) -> dict[str, Any]:
    """Slabs that the pool gets back for prompts of held-out text of several lengths, and rows that were pruned."""
    config = model.config
    layout = KvLayout(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, "float32")
    row_bytes = layout.bytes_per_token / (layout.layers * layout.kv_heads)
    freed = pruned = 0.0
    install = partial(own_attention, model)
    for number, length in enumerate(FREED_LENGTHS):
        start = number * (len(stream) - length) // len(FREED_LENGTHS)
        ids = torch.tensor(stream[start : start + length])
        prompt = compute_prompt(model, ids, kinds[ids.numpy()], install)
        keeper = CompetingKeeper(prompt, last_attention(prompt), KeepSpec(threshold))
        heads = [one for layer in range(layout.layers) for one in keeper.keep_of_prompt(layer)]
        kept = KeptRows.from_heads(
            layout,
            0,
            length,
            np.full((layout.layers, layout.kv_heads), COMPETED, np.uint8),
            [np.flatnonzero(one).astype(np.int32) for one in heads],
        )
        kept.check()
        freed += (layout.num_chunks(length) - kept.num_slabs) * layout.chunk_bytes
        pruned += (kept.all_rows - kept.num_rows) * row_bytes
    return {"prompts": list(FREED_LENGTHS), "keep_freed_ratio": round(freed / pruned, 3)}


def measure_with_codec(
    model: Any, kinds: NDArray[np.uint8], passages: Sequence[Passage], calibration: Calibration, name: str
) -> dict[str, Any]:
    """Losses of a codec alone, of a threshold alone, and of both together."""
    codec_id = complete_id(name, calibration)
    raw: Install = partial(own_attention, model)
    schemes = [build_scheme(codec_id, calibration, sink=sink) for sink in (True, False)]
    coded: list[Install] = [partial(_install_coded, model, scheme) for scheme in schemes]
    losses = defaultdict[str, list[float]](list)
    for passage in passages:
        for codec, (first, then) in (("", (raw, raw)), (name, coded)):
            prompt = compute_prompt(model, passage.prompt, passage_kinds(passage, kinds), first)
            keeper = CompetingKeeper(prompt, last_attention(prompt), KeepSpec(COMBINED))
            for keep, one in (("", None), ("evicted", keeper)):
                record = compute_answer(model, prompt, passage.answer, one, then)
                loss = torch.nn.functional.cross_entropy(record.logits, passage.answer).item()
                losses[" ".join(filter(None, (codec, keep)))].append(loss)
    exact = losses.pop("")
    rows = {way: loss_difference(some, exact) for way, some in losses.items()}
    total = rows[name]["nats"] + rows["evicted"]["nats"]
    both = rows[f"{name} evicted"]["nats"]
    return {
        "threshold": COMBINED,
        "losses": rows,
        "sum_of_both": round(total, 5),
        "exceeds_by_a_tenth": bool(both > total + 0.1 * abs(total)),
    }


def _install_coded(model: Any, scheme: CodingScheme, attend: Attend) -> AbstractContextManager[None]:
    return coded_attention(model, scheme, attend_rows=attend)


def measure_eviction(
    model: Any,
    windows: Sequence[torch.Tensor],
    series: Sequence[RecallSeries],
    calibration: Calibration,
    kinds: NDArray[np.uint8],
    stream: Sequence[int],
    progress: Progress,
    surrogate: Surrogate,
) -> dict[str, Any]:
    """The part `eviction` of the figures of one model.

    Args:
        model: of transformers, in float32.
        windows: of held-out text, prompt and answer, [tokens] each.
        series: tables with questions.
        calibration: with constants of the codec `CODEC`.
        kinds: the kind of each token of the vocabulary.
        stream: held-out text.
        progress: called with a line from time to time.
        surrogate: for `zap`.
    """
    text, passages = EvictionRun(model, kinds, surrogate), [text_passage(window) for window in windows]
    for number, passage in enumerate(passages):
        text.add_passage(passage)
        progress(f"eviction: {number + 1} of {len(passages)} windows")
    tables = EvictionRun(model, kinds, surrogate) if series else None
    for number, one in enumerate(series):
        assert tables is not None
        tables.add_passage(recall_passage(one))
        progress(f"eviction: {number + 1} of {len(series)} tables")
    prompts = np.concatenate([passage.prompt.numpy() for passage in passages])
    figures = summarize_run(text, tables)
    figures |= {
        "prompt_tokens": len(passages[0].prompt),
        "answer_tokens": ANSWER_TOKENS,
        "windows": len(windows),
    }
    figures["punct_pct"] = round(100 * float((kinds[prompts] & PUNCT_KIND != 0).mean()), 1)
    figures["freed"] = measure_freed(model, kinds, stream, COMBINED)
    figures["with_codec"] = {CODEC: measure_with_codec(model, kinds, passages, calibration, CODEC)}
    return figures


def print_eviction(figures: Mapping[str, Any]) -> None:
    """The figures as lines for people."""
    for rule in KEEP_RULES:
        for threshold, row in figures[rule]["thresholds"].items():
            heads = ", ".join(f"{policy} {share:.0f}" for policy, share in row.get("heads_pct", {}).items())
            print(f"  {rule}, T {threshold}: pruned {row['pruned_pct']} %, mass {row['answer_mass']} {heads}")
            for way, cells in {rule: row, **row.get("rivals", {})}.items():
                low, high = cells["loss"]["interval"]
                recall = f"  recall {cells['recall']['right_pct']:5.1f} %" if "recall" in cells else ""
                print(f"    {way:24} {cells['loss']['nats']:+.4f} nats ({low:+.4f} to {high:+.4f}){recall}")
        aims = [f"{aim} {value}" for aim, value in figures[rule].items() if aim != "thresholds"]
        print(f"  {rule}: " + ", ".join(aims))
    print("  " + ", ".join(f"{name} {figures[name]}" for name in ("punct_pct", "freed", "with_codec")))
