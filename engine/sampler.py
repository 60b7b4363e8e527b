"""From logits to tokens. A row's result depends on that row alone, bit by bit: not on batch, worker or attempt.

Order, as in vLLM: logit_bias, then repetition, frequency and presence penalties, then what may not be chosen at all
(grammar, stop tokens before `min_tokens`), temperature, min_p, top_k, top_p, draw. Log-probabilities are those of the
raw logits, before all of that, as OpenAI and vLLM report them; they are never below `LOWEST_LOGPROB`.

The draw is Gumbel-max: the token with the largest `logit / temperature + g`, where g comes from a hash of (seed, index
in the output, token id). No generator is carried along, so a request continues elsewhere with the same draws.

Rows that need nothing special go to one compiled loop, and greedy ones to one arg-max (ties go to the lowest id). The
others are first shaped one by one with numpy on `[vocab]` arrays: a batched reduction may add in another order when the
batch has another size. Logits are copied only where something changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numba
import numpy as np
import torch
from llguidance import LLTokenizer
from numpy.typing import NDArray

from diptych.errors import GrammarError
from diptych.messages import Logprob
from diptych.request import Sampling
from engine import grammar
from engine.loop import Picked
from engine.scheduler import Sequence as Live

Floats = NDArray[np.float32]

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say
SCORED_FLOATS = (
    1 << 16
)  # a block of prompt tokens is scored at once that stays in a core's cache: 512 kB of float64
NUCLEUS = 1024  # top_p sorts this many first, which nearly always hold its mass, and all only if they do not

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's
_MASK = (1 << 64) - 1


def stream(seed: int, index: int) -> int:
    """The 64-bit start of the noise for output token `index` of a request with this seed."""
    return _mixed((_mixed(seed & _MASK) + _GOLDEN * (index + 1)) & _MASK)


def _mixed(z: int) -> int:
    """splitmix64's finaliser."""
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


class Row:
    """What the sampler remembers of one sequence."""

    def __init__(
        self,
        prompt: list[int],
        output: list[int],
        sampling: Sampling,
        vocab: int,
        match: grammar.Matcher | None,
    ) -> None:
        self.sampling, self.index, self.match = sampling, len(output), match
        self._check(vocab)
        self.counts: NDArray[np.int32] | None = None  # of each token in the output, [vocab]
        self.seen: NDArray[np.bool_] | None = None  # in the prompt or the output, [vocab]
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
            self.counts = np.bincount(output, minlength=vocab).astype(np.int32)
            self.seen = self.counts > 0
            self.seen[prompt] = True
        self.biased = np.array(sorted(sampling.logit_bias), np.int64)
        self.bias = np.array(
            [sampling.logit_bias[token] for token in sorted(sampling.logit_bias)], np.float32
        )
        self.stops = np.array(sampling.stop_token_ids, np.int64)
        # Divisions by less would overflow; this is already as good as greedy.
        self.heat = max(sampling.temperature, 1e-6) if sampling.temperature > 0 else 0.0
        self.filtered = self.heat > 0 and (
            sampling.min_p > 0 or sampling.top_p < 1 or 0 < sampling.top_k < vocab
        )

    def _check(self, vocab: int) -> None:
        ids = [*self.sampling.logit_bias, *self.sampling.stop_token_ids]
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            raise ValueError(f"logit_bias and stop_token_ids must be in the vocabulary of {vocab} tokens")

    @property
    def done(self) -> bool:
        """Its grammar is complete: nothing can follow."""
        return self.match is not None and self.match.done

    @property
    def special(self) -> bool:
        """Whether the next token needs more than a temperature."""
        early = self.index < self.sampling.min_tokens and len(self.stops) > 0
        return bool(early or self.filtered or self.match or self.counts is not None or len(self.biased))

    def push(self, token: int) -> None:
        """Take note of the token that was chosen. Raises GrammarError if it does not fit the grammar."""
        self.index += 1
        if self.counts is not None and self.seen is not None:
            self.counts[token] += 1
            self.seen[token] = True
        if self.match is not None:
            self.match.push(token)

    def shape(self, logits: Floats) -> None:
        """Apply everything but the temperature, in place; what may not be chosen becomes -inf. Raises GrammarError."""
        logits[self.biased] += self.bias
        self._penalise(logits)
        self._forbid(logits)
        if self.filtered:
            self._filter(logits)

    def _penalise(self, logits: Floats) -> None:
        if self.counts is None or self.seen is None:
            return
        asked = self.sampling
        if asked.repetition_penalty != 1.0:
            seen = np.flatnonzero(self.seen)
            factor = np.float32(asked.repetition_penalty)
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
        written = np.flatnonzero(self.counts)
        times = self.counts[written].astype(np.float32)
        logits[written] -= np.float32(asked.frequency_penalty) * times + np.float32(asked.presence_penalty)

    def _forbid(self, logits: Floats) -> None:
        early = self.index < self.sampling.min_tokens
        if self.match is None:
            if early:
                logits[self.stops] = -np.inf
            return
        allowed = self.match.mask(len(logits))
        if early:
            longer = allowed.copy()
            longer[self.stops] = False
            # Where the grammar leaves nothing but the end, min_tokens cannot be had.
            allowed = longer if longer.any() else allowed
        logits[~allowed] = -np.inf

    def _filter(self, logits: Floats) -> None:
        """min_p, top_k and top_p of the distribution after temperature, each on what the one before it left."""
        asked = self.sampling
        if asked.min_p > 0:
            scaled = logits.astype(np.float64) / self.heat
            logits[scaled < scaled.max() + math.log(asked.min_p)] = -np.inf
        if 0 < asked.top_k < len(logits):
            _keep(logits, _largest(logits, asked.top_k))
        if asked.top_p < 1:
            self._nucleus(logits)

    def _nucleus(self, logits: Floats) -> None:
        scaled = logits.astype(np.float64) / self.heat
        peak = scaled.max()
        total = np.exp(scaled - peak).sum()
        for count in (min(NUCLEUS, len(logits)), len(logits)):
            ordered = _largest(logits, count)
            mass = np.cumsum(np.exp(ordered.astype(np.float64) / self.heat - peak))
            if mass[-1] >= self.sampling.top_p * total:
                break
        # A token stays as long as those before it have less than top_p; so the first always does.
        _keep(logits, ordered[: 1 + np.count_nonzero(mass < self.sampling.top_p * total)])


def _largest(logits: Floats, count: int) -> Floats:
    """The `count` largest values, in falling order. Values only: which of several equals stays, `_keep` says."""
    split = len(logits) - count
    return np.sort(np.partition(logits, split)[split:] if split else logits)[::-1]


def _keep(logits: Floats, ordered: Floats) -> None:
    """Leave as many tokens as `ordered` has, whose last is the lowest value to stay; of equals the lowest ids."""
    lowest = ordered[-1]
    equals = np.flatnonzero(logits == lowest)
    spare = equals[len(ordered) - np.count_nonzero(logits > lowest) :]
    logits[logits < lowest] = -np.inf
    logits[spare] = -np.inf


class Sampler:
    """Chooses tokens for an engine; `tokenizer` (of `grammar.load`) is needed for structured output alone."""

    def __init__(self, vocab_size: int, tokenizer: LLTokenizer | None = None) -> None:
        self.vocab_size, self.tokenizer = vocab_size, tokenizer

    def open(self, seq: Live) -> Row:
        """The row of a sequence, as if the sampler had chosen all of its output so far.

        Raises:
            GrammarError: the grammar does not compile, or the output does not fit it.
            ValueError: a token id is outside the vocabulary.
        """
        match = None
        if seq.sampling.grammar is not None:
            if self.tokenizer is None:
                raise GrammarError("structured output is not possible with this model's tokenizer")
            match = grammar.compile(seq.sampling.grammar, self.tokenizer)
            match.replay(seq.output)
        return Row(seq.prompt, seq.output, seq.sampling, self.vocab_size, match)

    def sample(self, logits: Sequence[torch.Tensor], rows: Sequence[Row]) -> list[Picked | Exception]:
        """One token for each row. `logits`: float32 `[1, vocab]` each, left as they are; rows are not advanced.

        A row that cannot be sampled gets the exception that says why in place of a token.
        """
        raw = _together(logits)
        special = [place for place, row in enumerate(rows) if row.special]
        errors: dict[int, Exception] = {}
        shaped = raw.copy() if special else raw
        for place in special:
            try:
                rows[place].shape(shaped[place])
            except Exception as error:
                errors[place] = error
        tokens = _choose(shaped, rows)
        return [
            errors.get(place) or _picked(raw, place, row, token)
            for place, (row, token) in enumerate(zip(rows, tokens, strict=True))
        ]

    def score(self, logits: torch.Tensor, tokens: list[int], top: int) -> list[Logprob]:
        """The log-probability of `tokens[i]` by row i of float32 `[len(tokens), vocab]`, and of the `top` likeliest.

        Raises:
            ValueError: the logits are not finite.
        """
        return _scores(logits.detach().cpu().numpy(), tokens, top)


def _together(parts: Sequence[torch.Tensor]) -> Floats:
    """[rows, vocab] of `[1, vocab]` each: a view if they lie one behind the other, as a runner's do, else a copy."""
    first = parts[0].detach()
    vocab, begin = first.shape[1], first.data_ptr()
    stride, end = (
        vocab * first.element_size(),
        (first.storage_offset() + len(parts) * vocab) * first.element_size(),
    )
    behind = list(range(begin, begin + len(parts) * stride, stride))
    apart = [part.data_ptr() for part in parts] != behind or end > first.untyped_storage().nbytes()
    if apart or not first.is_contiguous():
        first = torch.cat([part.detach() for part in parts])
    whole: Floats = first.as_strided((len(parts), vocab), (vocab, 1)).cpu().numpy()
    return whole


def _choose(logits: Floats, rows: Sequence[Row]) -> list[int]:
    """The token of each row, -1 where there is none: its logits are not finite, or leave nothing."""
    if not any(row.heat for row in rows):
        # NaN counts as the largest; so the maximum is finite only if all is well.
        tokens = logits.argmax(axis=1)
        tokens[~np.isfinite(logits[np.arange(len(rows)), tokens])] = -1
    else:
        tokens = np.empty(len(rows), np.int64)
        heat = np.array([row.heat for row in rows], np.float64)
        starts = [stream(row.sampling.seed, row.index) if row.heat else 0 for row in rows]
        _draw(logits, heat, np.array(starts, np.uint64), tokens)
    chosen: list[int] = tokens.tolist()
    return chosen


def _picked(raw: Floats, place: int, row: Row, token: int) -> Picked | Exception:
    if token < 0:
        return ValueError("the logits are not finite, or leave no token to choose")
    asked = row.sampling.logprobs
    return Picked(token, None if asked is None else _scores(raw[place : place + 1], [token], asked)[0])


def _scores(logits: Floats, tokens: list[int], top: int) -> list[Logprob]:
    block = max(1, SCORED_FLOATS // logits.shape[1])
    scored: list[Logprob] = []
    for begin in range(0, len(tokens), block):
        part = logits[begin : begin + block].astype(np.float64)
        peak = part.max(axis=1, keepdims=True)
        if not np.isfinite(peak).all():
            raise ValueError("the logits are not finite")
        part -= peak + np.log(np.exp(part - peak).sum(axis=1, keepdims=True))
        np.maximum(part, LOWEST_LOGPROB, out=part)
        scored += [
            Logprob(token, float(row[token]), _top(row, top))
            for row, token in zip(part, tokens[begin : begin + block], strict=True)
        ]
    return scored


def _top(logprobs: NDArray[np.float64], top: int) -> list[tuple[int, float]]:
    """The `top` likeliest tokens, best first; of equals the lowest ids."""
    top = min(top, len(logprobs))
    if top == 0:
        return []
    lowest = np.partition(logprobs, -top)[-top]
    ids = np.flatnonzero(logprobs >= lowest)
    ids = ids[np.argsort(-logprobs[ids], kind="stable")][:top]
    return [(int(token), float(logprobs[token])) for token in ids]


def _draw_rows(logits: Any, heat: Any, starts: Any, tokens: Any) -> None:
    """For each row of `logits` [rows, vocab] the token with the largest logit / heat + noise, or logit if heat is 0.

    -1 when a row has a NaN or +inf, or nothing above -inf. Scalar operations in the order of ids, so a row's result
    does not depend on where it lies.
    """
    golden, mix1, mix2 = np.uint64(_GOLDEN), np.uint64(_MIX1), np.uint64(_MIX2)
    for row in range(logits.shape[0]):
        best, chosen, sound, z = -np.inf, -1, True, starts[row]
        for token in range(logits.shape[1]):
            logit = np.float64(logits[row, token])
            z += golden
            if not logit < np.inf:
                sound = False
                break
            if heat[row] == 0.0:
                if logit > best:
                    best, chosen = logit, token
                continue
            if logit == -np.inf:
                continue
            height = logit / heat[row]
            bits = (z ^ (z >> np.uint64(30))) * mix1
            bits = (bits ^ (bits >> np.uint64(27))) * mix2
            bits ^= bits >> np.uint64(31)
            uniform = (np.float64(bits >> np.uint64(12)) + 0.5) * 2.0**-52  # in (0, 1), exactly representable
            # The noise is at most -log(1 - u), and e**d > 1 + d + d*d/2 + d*d*d/6: most tokens need no logarithm.
            gap = best - height
            if gap > 0.0 and (1.0 - uniform) * (1.0 + gap * (1.0 + gap * (0.5 + gap / 6.0))) > 1.0 + 1e-9:
                continue
            score = height - math.log(-math.log(uniform))
            if score > best:
                best, chosen = score, token
        tokens[row] = chosen if sound else -1


# No fastmath: sums here are compared, and must come out alike everywhere.
_draw = cast("Callable[[Any, Any, Any, Any], None]", numba.njit(nogil=True, cache=True)(_draw_rows))
