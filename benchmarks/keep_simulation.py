"""Eviction inside the model of transformers, with the true tokens of the answer: for `benchmarks.kv_eviction`.

A prompt attends in full, so it is computed once, and its queries, keys and values are kept. An answer is then computed
in one pass for each way of dropping rows. Within a layer its blocks of 64 tokens come one after the other, since what
is kept for a block depends on the queries of the block before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import PROFILE_ROWS, KeepSpec
from engine.calibration.kv_quality import Attend
from kvcache.eviction.policies import FIRST_TOKENS, KeepRule, choose_policies, kept_mask
from tests.support.keep_reference import mean_scores, pool_attention, row_masses

Bools = NDArray[np.bool_]
Doubles = NDArray[np.float64]
# What counts of the mass that a policy recovers of each row: the product takes the minimum.
PoolRows = Callable[[Doubles], Any]
# Puts an attention function into the model. Another one than `own_attention` also codes keys and values.
Install = Callable[[Attend], AbstractContextManager[None]]

_NAME = "diptych_recorded"


@contextmanager
def own_attention(model: Any, attend: Attend) -> Iterator[None]:
    """Within, every layer of the model calls `attend`."""
    ALL_ATTENTION_FUNCTIONS[_NAME] = attend
    ALL_MASK_ATTENTION_FUNCTIONS[_NAME] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    before, model.config._attn_implementation = model.config._attn_implementation, _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


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


class Keeper(Protocol):
    """Decides which rows one head keeps."""

    def keep_of_prompt(self, layer: int, head: int) -> Bools:
        """Which of the prompt's rows stay, [P]."""

    def keep_at_block(self, layer: int, head: int, rows: NDArray[np.int64], attention: Doubles) -> Bools:
        """Which rows stay when a block of 64 tokens is complete.

        Args:
            layer: and
            head: which head it is.
            rows: positions that the head still has, those of the block included, ascending.
            attention: of the block's queries to these rows, [64, rows]; 0 where a query does not see a row.
        """


@dataclass(frozen=True, slots=True)
class PromptProfile:
    """What the last rows of a prompt say about every head: scores and attention do not depend on a threshold.

    Args:
        scores: mean attention to each token by layer and head, [P] each.
        masses: recovered mass of policies 0 to 3, [layers, KV heads, 4].
        attention: pooled attention of the profiled rows, [R, P] each.
    """

    scores: list[list[Doubles]]
    masses: Doubles
    attention: list[list[Doubles]]


def profile_prompt(
    prompt: Prompt, boundary: int, rule: KeepRule, pool_rows: PoolRows = np.min
) -> PromptProfile:
    """The reference's profile of all heads; with another `pool_rows` an ablation of it."""
    scores, masses, attention = list[list[Doubles]](), list[list[Any]](), list[list[Doubles]]()
    kinds = prompt.kinds[: len(prompt.ids)]
    for queries, keys in zip(prompt.queries, prompt.keys, strict=True):
        rows = queries[:, :, -PROFILE_ROWS:].transpose(1, 2).numpy()
        attention.append([pool_attention(q, k) for q, k in zip(rows, keys.numpy(), strict=True)])
        scores.append([mean_scores(one) for one in attention[-1]])
        of_rows = [
            row_masses(one, mean, kinds, boundary, rule)
            for one, mean in zip(attention[-1], scores[-1], strict=True)
        ]
        masses.append([[pool_rows(one) for one in policies] for policies in of_rows])
    return PromptProfile(scores, np.array(masses), attention)


class PolicyKeeper:
    """FastGen's policies, as the product applies them."""

    def __init__(self, prompt: Prompt, profile: PromptProfile, spec: KeepSpec, rule: KeepRule) -> None:
        self._prompt, self._profile, self._spec, self._rule = prompt, profile, spec, rule
        self.policies = choose_policies(profile.masses, spec.threshold, len(prompt.ids))

    def keep_of_prompt(self, layer: int, head: int) -> Bools:
        rows = np.arange(len(self._prompt.ids))
        return self._kept(layer, head, rows, self._profile.scores[layer][head], len(rows))

    def keep_at_block(self, layer: int, head: int, rows: NDArray[np.int64], attention: Doubles) -> Bools:
        length = int(rows[-1]) + 1
        sees = rows <= np.arange(length - len(attention), length)[:, None]
        return self._kept(layer, head, rows, attention.sum(axis=0) / sees.sum(axis=0), length)

    def recovered(self) -> Doubles:
        """The mass that each head's policy recovers of the profiled rows, pooled, [layers, KV heads]."""
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

    def keep_of_prompt(self, layer: int, head: int) -> Bools:
        rows = np.arange(len(self._prompt.ids))
        return self._choose(rows, self._sums[layer][head][rows], self._counts[0])

    def keep_at_block(self, layer: int, head: int, rows: NDArray[np.int64], attention: Doubles) -> Bools:
        sums = self._sums[layer][head]
        sums[rows] += attention.sum(axis=0)
        block = (int(rows[-1]) + 1 - len(self._prompt.ids)) // CHUNK_TOKENS
        return self._choose(rows, sums[rows], self._counts[block])


def attention_sums(prompt: Prompt) -> list[list[Doubles]]:
    """The sum of attention to each token over all rows of the prompt, pooled over query heads: what H2O counts."""
    mask = torch.ones(len(prompt.ids), len(prompt.ids), dtype=torch.bool).tril()
    found = list[list[Doubles]]()
    for queries, keys in zip(prompt.queries, prompt.keys, strict=True):
        heads = list[Doubles]()
        for query, key in zip(queries, keys, strict=True):
            scores = (query @ key.T * key.shape[1] ** -0.5).masked_fill(~mask, -torch.inf)
            heads.append(scores.softmax(dim=-1).mean(dim=0).sum(dim=0).double().numpy())
        found.append(heads)
    return found


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
        out, masses, shares = list[torch.Tensor](), list[torch.Tensor](), list[float]()
        for head in range(len(keys)):
            logits = queries[head] @ keys[head].T * module.scaling
            seen = _seen_by_answer(logits, length, layer, head, keeper, record.kept)
            out.append(logits.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ values[head])
            causal = torch.ones(seen.shape, dtype=torch.bool).tril(length)
            masses.append((logits.masked_fill(~causal, -torch.inf).softmax(dim=-1) * seen).sum(dim=-1))
            shares.append(float(seen[0, :length].float().mean()))
        record.masses.append(torch.stack(masses))
        record.shares.append(shares)
        return torch.cat(out).transpose(0, 1)[None], None

    positions = torch.arange(length, length + len(answer))[None]
    with install(attend):
        logits = model(answer[None], position_ids=positions, use_cache=False).logits[0]
    record.logits = torch.cat((prompt.logits[None], logits[:-1]))
    return record


def _seen_by_answer(
    logits: torch.Tensor, length: int, layer: int, head: int, keeper: Keeper | None, kept: list[int]
) -> torch.Tensor:
    """Which tokens each token of the answer sees, [answer, all tokens]. Adds to `kept`.

    Args:
        logits: of all tokens, [query heads, answer, all tokens].
        length: of the prompt.
        layer: and
        head: which head it is.
        keeper: decides.
        kept: rows, at the prompt's end and after each block.
    """
    tokens, total = logits.shape[1:]
    seen = torch.ones(tokens, total, dtype=torch.bool).tril(length)
    if keeper is None:
        return seen
    stays = np.ones(total, np.bool_)
    stays[:length] = keeper.keep_of_prompt(layer, head)
    kept[0] += int(stays[:length].sum())
    for start in range(0, tokens, CHUNK_TOKENS):
        stop = start + CHUNK_TOKENS
        seen[start:stop] &= torch.from_numpy(stays)
        if stop >= tokens:
            break
        rows = np.flatnonzero(stays[: length + stop])
        block = logits[:, start:stop, rows].masked_fill(~seen[start:stop, rows], -torch.inf)
        attention = block.softmax(dim=-1).mean(dim=0).double().numpy()
        stays[rows] = keeper.keep_at_block(layer, head, rows, attention)
        kept[stop // CHUNK_TOKENS] += int(stays[: length + stop].sum())
    return seen
