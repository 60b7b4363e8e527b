"""Eviction inside the model of transformers, with the true tokens of the answer: for `benchmarks.kv_eviction`.

A prompt attends in full, so it is computed once, and its queries, keys and values are kept. An answer is then computed
in one pass for each way of dropping rows. Within a layer its blocks of 64 tokens come one after the other, since what
is kept for a block depends on the queries of the block before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import PROFILE_ROWS, KeepSpec
from engine.calibration.kv_quality import Attend
from kvcache.eviction.ada import LayerTally, Marks, mark_answer, mark_prompt
from kvcache.eviction.policies import FIRST_TOKENS, KeepRule, choose_policies, kept_mask
from kvcache.eviction.zap import Angles, KeepSurrogate
from tests.support.keep_reference import mean_scores, pool_attention, recovered_masses

Bools = NDArray[np.bool_]
Doubles = NDArray[np.float64]
# Puts an attention function into the model. Another one than `own_attention` also codes keys and values.
Install = Callable[[Attend], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that was computed.

    Args:
        ids: its tokens, [P].
        kinds: bits of each token, those of the answer included, [P + answer].
        queries: per layer, [KV heads, query heads of each, P, D], rotated.
        keys: per layer, [KV heads, P, D], rotated.
        values: per layer, [KV heads, P, D].
        logits: of the last token, [vocabulary].
    """

    ids: torch.Tensor
    kinds: NDArray[np.uint8]
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    logits: torch.Tensor

    @property
    def num_heads(self) -> int:
        """KV heads of all layers."""
        return sum(map(len, self.keys))


@torch.no_grad()
def compute_prompt(model: Any, ids: torch.Tensor, kinds: NDArray[np.uint8], install: Install) -> Prompt:
    """One forward pass over a prompt, with full attention."""
    found = Prompt(ids, kinds, [], [], [], torch.empty(0))

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        found.queries.append(query[0].unflatten(0, (key.shape[1], -1)))
        found.keys.append(key[0])
        found.values.append(value[0])
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    with install(attend):
        logits = model(ids[None], use_cache=False, logits_to_keep=1).logits[0, -1]
    return Prompt(ids, kinds, found.queries, found.keys, found.values, logits)


@dataclass(frozen=True, slots=True)
class HeadBlock:
    """What one head has when a block of 64 tokens of an answer is complete.

    Args:
        rows: positions that it still has, those of the block included, ascending.
        attention: of the block's queries to these rows, [64, rows]; 0 where a query does not see a row.
        keys: and
        values: of these rows, [rows, D]; keys are rotated.
    """

    rows: NDArray[np.int64]
    attention: Doubles
    keys: NDArray[np.float32]
    values: NDArray[np.float32]

    @property
    def length(self) -> int:
        """Tokens that have KV."""
        return int(self.rows[-1]) + 1

    @property
    def scores(self) -> Doubles:
        """Mean attention to each row, over the queries that see it."""
        sees = self.rows <= np.arange(self.length - len(self.attention), self.length)[:, None]
        scores: Doubles = self.attention.sum(axis=0) / sees.sum(axis=0)
        return scores


class Keeper(Protocol):
    """Decides which rows the heads of a layer keep."""

    def keep_of_prompt(self, layer: int) -> list[Bools]:
        """Which of the prompt's rows stay, [P] for each head."""

    def keep_at_block(self, layer: int, blocks: Sequence[HeadBlock]) -> list[Bools]:
        """Which rows of each head stay when a block of 64 tokens is complete."""


@dataclass(frozen=True, slots=True)
class PromptProfile:
    """What the rows of a prompt say about every head: scores and attention do not depend on a threshold.

    Args:
        scores: mean attention of all rows to each token by layer and head, [P] each.
        masses: recovered mass of policies 0 to 3, the mean over all rows, [layers, KV heads, 4].
        last: pooled attention of the last 64 rows, [R, P] each.
    """

    scores: list[list[Doubles]]
    masses: Doubles
    last: list[list[Doubles]]


def profile_prompt(prompt: Prompt, boundary: int, rule: KeepRule) -> PromptProfile:
    """The reference's profile of all heads, in float64."""
    found, masses = PromptProfile([], np.empty(0), []), list[list[Doubles]]()
    kinds = prompt.kinds[: len(prompt.ids)]
    for queries, keys in zip(prompt.queries, prompt.keys, strict=True):
        heads = zip(queries.transpose(1, 2).numpy(), keys.numpy(), strict=True)
        attention = [pool_attention(q, k) for q, k in heads]
        found.scores.append([mean_scores(one) for one in attention])
        found.last.append([one[-PROFILE_ROWS:].copy() for one in attention])
        masses.append(
            [
                recovered_masses(one, mean, kinds, boundary, rule)
                for one, mean in zip(attention, found.scores[-1], strict=True)
            ]
        )
    return replace(found, masses=np.array(masses))


def last_attention(prompt: Prompt) -> list[list[Doubles]]:
    """`PromptProfile.last` alone."""
    return [
        [
            pool_attention(q, k)
            for q, k in zip(rows[:, :, -PROFILE_ROWS:].transpose(1, 2).numpy(), keys.numpy(), strict=True)
        ]
        for rows, keys in zip(prompt.queries, prompt.keys, strict=True)
    ]


class PolicyKeeper:
    """The rule `fastgen`, as the product applies it."""

    def __init__(self, prompt: Prompt, profile: PromptProfile, spec: KeepSpec, rule: KeepRule) -> None:
        self._prompt, self._profile, self._spec, self._rule = prompt, profile, spec, rule
        self.policies = choose_policies(profile.masses, spec.threshold, len(prompt.ids))

    def keep_of_prompt(self, layer: int) -> list[Bools]:
        rows = np.arange(len(self._prompt.ids))
        return [
            self._kept(layer, head, rows, scores, len(rows))
            for head, scores in enumerate(self._profile.scores[layer])
        ]

    def keep_at_block(self, layer: int, blocks: Sequence[HeadBlock]) -> list[Bools]:
        return [self._kept(layer, head, one.rows, one.scores, one.length) for head, one in enumerate(blocks)]

    def recovered(self) -> Doubles:
        """The mass that each head's policy recovers of the prompt's rows, [layers, KV heads]."""
        whole = np.concatenate((self._profile.masses, np.ones((*self.policies.shape, 1))), axis=-1)
        masses: Doubles = np.take_along_axis(whole, self.policies[..., None].astype(np.int64), axis=-1)[
            ..., 0
        ]
        return masses

    def _kept(self, layer: int, head: int, rows: NDArray[np.int64], scores: Doubles, length: int) -> Bools:
        return kept_mask(
            int(self.policies[layer, head]),
            self._prompt.kinds[rows],
            rows,
            scores,
            length,
            len(self._prompt.ids),
            self._spec.boundary,
            self._rule,
        )


class CompetingKeeper:
    """The rule `ada`, as the product applies it."""

    def __init__(self, prompt: Prompt, last: list[list[Doubles]], spec: KeepSpec) -> None:
        """`last` is the attention of the last 64 rows, as in `PromptProfile`."""
        self._prompt, self._last, self._spec = prompt, last, spec
        # Rows of the prompt behind the boundary that the heads of each layer keep on average.
        self._kept = [0.0] * len(last)

    def keep_of_prompt(self, layer: int) -> list[Bools]:
        length, boundary = len(self._prompt.ids), self._spec.boundary
        tally, marks, seen = LayerTally(1), list[Marks](), np.ones(length, np.bool_)
        for attention in self._last[layer]:
            marks.append(mark_prompt(mean_scores(attention).astype(np.float32), length, boundary, seen))
            tally.add_prompt_head(0, marks[-1], attention.mean(axis=0))
        [cut] = tally.cut_prompt(self._spec.threshold)
        kept: list[Bools] = [one >= cut for one in marks]
        self._kept[layer] = float(np.mean([one[boundary:].sum() for one in kept]))
        return kept

    def keep_at_block(self, layer: int, blocks: Sequence[HeadBlock]) -> list[Bools]:
        prompt, tally, marks = len(self._prompt.ids), LayerTally(1), list[Marks]()
        share = self._kept[layer] / (prompt - self._spec.boundary)
        for one in blocks:
            seen, scores = np.ones(len(one.rows), np.bool_), one.scores.astype(np.float32)
            marks.append(mark_answer(scores, one.rows, prompt, one.length, seen))
            tally.add_answer_head(0, marks[-1], share * (one.length - CHUNK_TOKENS - prompt))
        [cut] = tally.cut_answer()
        return [one >= cut for one in marks]


class SurrogateKeeper:
    """The rule `zap`, as the product applies it."""

    def __init__(
        self, prompt: Prompt, surrogate: KeepSurrogate, frequencies: Doubles, spec: KeepSpec
    ) -> None:
        self._prompt, self._surrogate, self._frequencies = prompt, surrogate, frequencies
        self._spec, self._threshold = spec, surrogate.find_threshold(spec.threshold)

    def keep_of_prompt(self, layer: int) -> list[Bools]:
        rows = np.arange(len(self._prompt.ids))
        return [
            self._kept(layer, head, rows, keys, values)
            for head, (keys, values) in enumerate(
                zip(self._prompt.keys[layer].numpy(), self._prompt.values[layer].numpy(), strict=True)
            )
        ]

    def keep_at_block(self, layer: int, blocks: Sequence[HeadBlock]) -> list[Bools]:
        return [self._kept(layer, head, one.rows, one.keys, one.values) for head, one in enumerate(blocks)]

    def _kept(
        self, layer: int, head: int, rows: NDArray[np.int64], keys: NDArray[Any], values: NDArray[Any]
    ) -> Bools:
        angles = Angles(rows, self._frequencies)
        scores = self._surrogate.score_rows(layer, head, keys, values, angles)
        kept: Bools = scores >= self._threshold
        first = max(FIRST_TOKENS, self._spec.boundary)
        kept |= (rows < first) | (rows >= rows[-1] + 1 - CHUNK_TOKENS)
        return kept


# What all heads keep under a fixed policy, given a number of rows: rows, sums of attention, number of rows to keep.
FixedChoice = Callable[[NDArray[np.int64], Doubles, int], Bools]


def keep_window(rows: NDArray[np.int64], sums: Doubles, count: int) -> Bools:
    """The last rows."""
    kept: Bools = np.arange(len(rows)) >= len(rows) - count
    return kept


def keep_sinks(rows: NDArray[np.int64], sums: Doubles, count: int) -> Bools:
    """The first four positions and the last rows (StreamingLLM, Xiao et al. 2024, section 3.2)."""
    first: Bools = rows < FIRST_TOKENS
    return first | keep_window(rows, sums, max(0, count - int(first.sum())))


def keep_heavy(rows: NDArray[np.int64], sums: Doubles, count: int) -> Bools:
    """Half of them the last rows, half those with the largest sum of attention so far (H2O, Zhang et al. 2023)."""
    last = keep_window(rows, sums, count // 2)
    best = np.argsort(np.where(last, -np.inf, sums), kind="stable")[::-1][: count - int(last.sum())]
    last[best] = True
    return last


FIXED_POLICIES: dict[str, FixedChoice] = {
    "window": keep_window,
    "sink + window": keep_sinks,
    "heavy hitter": keep_heavy,
}


class FixedKeeper:
    """The same policy and the same number of rows for all heads.

    Args:
        prompt: a computed prompt.
        choose: the policy.
        counts: rows per head, at the prompt's end and after each block.
        sums: of attention to each token of the prompt, by layer and head, [P] each.
    """

    def __init__(
        self, prompt: Prompt, choose: FixedChoice, counts: Sequence[int], sums: list[list[Doubles]]
    ) -> None:
        self._prompt, self._choose, self._counts = prompt, choose, counts
        length = len(prompt.kinds)
        self._sums = [[np.pad(one, (0, length - len(one))) for one in heads] for heads in sums]

    def keep_of_prompt(self, layer: int) -> list[Bools]:
        rows = np.arange(len(self._prompt.ids))
        return [self._choose(rows, sums[rows], self._counts[0]) for sums in self._sums[layer]]

    def keep_at_block(self, layer: int, blocks: Sequence[HeadBlock]) -> list[Bools]:
        kept = list[Bools]()
        for sums, one in zip(self._sums[layer], blocks, strict=True):
            sums[one.rows] += one.attention.sum(axis=0)
            block = (one.length - len(self._prompt.ids)) // CHUNK_TOKENS
            kept.append(self._choose(one.rows, sums[one.rows], self._counts[block]))
        return kept


@dataclass(slots=True)
class AnswerRecord:
    """What an answer's pass saw.

    Args:
        logits: of the prompt's last token and of all the answer's but the last, [answer, vocabulary].
        kept: rows that all heads keep, at the prompt's end and after each block.
        masses: attention that falls on what is kept, of full attention, by layer: [KV heads, query heads, answer].
        shares: of the prompt's rows that each head keeps, by layer: [KV heads].
    """

    logits: torch.Tensor
    kept: list[int]
    masses: list[torch.Tensor] = field(default_factory=list)
    shares: list[list[float]] = field(default_factory=list)


@torch.no_grad()
def compute_answer(
    model: Any, prompt: Prompt, answer: torch.Tensor, keeper: Keeper | None, install: Install
) -> AnswerRecord:
    """One forward pass over the tokens of an answer, which attend to what `keeper` keeps; None: to everything."""
    length, blocks = len(prompt.ids), -(-len(answer) // CHUNK_TOKENS)
    record = AnswerRecord(torch.empty(0), [0] * blocks)

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        layer = module.layer_idx
        keys = torch.cat((prompt.keys[layer], key[0]), dim=1)
        values = torch.cat((prompt.values[layer], value[0]), dim=1)
        queries = query[0].unflatten(0, (len(keys), -1))
        logits = [one @ some.T * module.scaling for one, some in zip(queries, keys, strict=True)]
        seen = _seen_by_answer(logits, keys, values, length, layer, keeper, record.kept)
        out, masses = list[torch.Tensor](), list[torch.Tensor]()
        for one, mask, some in zip(logits, seen, values, strict=True):
            out.append(one.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ some)
            causal = torch.ones(mask.shape, dtype=torch.bool).tril(length)
            masses.append((one.masked_fill(~causal, -torch.inf).softmax(dim=-1) * mask).sum(dim=-1))
        record.masses.append(torch.stack(masses))
        record.shares.append([float(mask[0, :length].float().mean()) for mask in seen])
        return torch.cat(out).transpose(0, 1)[None], None

    positions = torch.arange(length, length + len(answer))[None]
    with install(attend):
        logits = model(answer[None], position_ids=positions, use_cache=False).logits[0]
    record.logits = torch.cat((prompt.logits[None], logits[:-1]))
    return record


def _seen_by_answer(
    logits: Sequence[torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    length: int,
    layer: int,
    keeper: Keeper | None,
    kept: list[int],
) -> list[torch.Tensor]:
    """Which tokens each token of the answer sees in each head, [answer, all tokens]. Adds to `kept`.

    Args:
        logits: of all tokens, [query heads, answer, all tokens] for each KV head.
        keys: and
        values: of all tokens, [KV heads, all tokens, D].
        length: of the prompt.
        layer: which layer it is.
        keeper: decides.
        kept: rows, at the prompt's end and after each block.
    """
    tokens, total = logits[0].shape[1:]
    seen = [torch.ones(tokens, total, dtype=torch.bool).tril(length) for _ in logits]
    if keeper is None:
        return seen
    stays = [np.ones(total, np.bool_) for _ in logits]
    for one, first in zip(stays, keeper.keep_of_prompt(layer), strict=True):
        one[:length] = first
        kept[0] += int(first.sum())
    for start in range(0, tokens, CHUNK_TOKENS):
        stop, blocks = start + CHUNK_TOKENS, list[HeadBlock]()
        for mask, one in zip(seen, stays, strict=True):
            mask[start:stop] &= torch.from_numpy(one)
        if stop >= tokens:
            break
        for head, mask in enumerate(seen):
            rows = np.flatnonzero(stays[head][: length + stop])
            block = logits[head][:, start:stop, rows].masked_fill(~mask[start:stop, rows], -torch.inf)
            attention = block.softmax(dim=-1).mean(dim=0).double().numpy()
            blocks.append(HeadBlock(rows, attention, keys[head, rows].numpy(), values[head, rows].numpy()))
        for one, block_of, still in zip(stays, blocks, keeper.keep_at_block(layer, blocks), strict=True):
            one[block_of.rows] = still
            kept[stop // CHUNK_TOKENS] += int(one[: length + stop].sum())
    return seen
