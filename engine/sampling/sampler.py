"""Samples tokens from logits. The result of a row depends on this row alone, to the last bit: not on its batch, its
worker or its attempt.

The order is that of vLLM: logit_bias, then repetition, frequency and presence penalties, then the tokens that must not
be chosen (named ones, grammar, stop tokens before `min_tokens`), temperature, min_p, top_k, top_p, draw.
Log-probabilities are of the raw logits, before all of that (`scores`).

The draw is Gumbel-max: the token with the largest `logit / temperature + g`, where g comes from a hash of (seed, index
in the output, token id). There is no generator state, so another worker can continue a request with the same draws.

Rows that need only a temperature are sampled in one compiled loop, and greedy rows by one arg-max (ties go to the
lowest id). The logits of other rows are first modified row by row with numpy on `[vocab]` arrays: a batched reduction
could add in another order when the batch has another size. Logits are copied only if something changes them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from llguidance import LLTokenizer
from numpy.typing import NDArray

from diptych.errors import GrammarError
from diptych.kernels.cache import cached
from diptych.messages import Logprob
from diptych.request import Pooling, SamplingParams
from engine.isolation import BadSamplingParams
from engine.protocols import SampledToken
from engine.sampling import grammar
from engine.sampling.gate import ThoughtCounter
from engine.sampling.grammar_cache import GrammarCache, MatcherRequest
from engine.sampling.pooler import pool_row
from engine.sampling.scores import score_rows
from engine.sampling.token_bans import make_bans
from engine.sequence import Sequence as Live

Floats = NDArray[np.float32]

# Weight of the past in a row's mask time, per mask. After one slow mask a row counts as slow for a while.
COST_DECAY = 0.9
# top_p sorts this many of the largest logits first. If they do not suffice, which is rare, it sorts all.
TOP_P_PRESORT = 1024

GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's
_MASK = (1 << 64) - 1


def noise_start(seed: int, index: int) -> int:
    """The 64-bit start value of the noise for output token `index` of a request with this seed."""
    return _mix_bits((_mix_bits(seed & _MASK) + GOLDEN * (index + 1)) & _MASK)


def _mix_bits(z: int) -> int:
    """splitmix64's finaliser, a hash of 64 bits."""
    z = ((z ^ (z >> 30)) * MIX1) & _MASK
    z = ((z ^ (z >> 27)) * MIX2) & _MASK
    return z ^ (z >> 31)


class SamplerRow:
    """The sampling state of one sequence.

    If the sequence is sampled before its grammar is compiled, sampling waits for it.
    """

    def __init__(
        self,
        prompt: list[int],
        output: list[int],
        sampling: SamplingParams,
        vocab: int,
        match: MatcherRequest | None,
    ) -> None:
        self.sampling, self.index, self._match = sampling, len(output), match
        # Expected seconds of the row's next grammar mask.
        self.cost_s = 0.0
        self._check_ids(vocab)
        # [vocab]: how often each token is in the output.
        self.counts: NDArray[np.int32] | None = None
        # [vocab]: whether each token is in the prompt or the output.
        self.seen: NDArray[np.bool_] | None = None
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
            self.counts = np.bincount(output, minlength=vocab).astype(np.int32)
            self.seen = self.counts > 0
            self.seen[prompt] = True
        self.biased = np.array(sorted(sampling.logit_bias), np.int64)
        self.bias = np.array(
            [sampling.logit_bias[token] for token in sorted(sampling.logit_bias)], np.float32
        )
        self.stops = np.array(sampling.stop_token_ids, np.int64)
        # A temperature below 1e-6 would overflow the division, and 1e-6 is as good as greedy.
        self.heat = max(sampling.temperature, 1e-6) if sampling.temperature > 0 else 0.0
        self._thought = None if sampling.thought is None else ThoughtCounter(sampling.thought, output)
        self._bans = make_bans(sampling, output)
        self.filtered = self.heat > 0 and (
            sampling.min_p > 0 or sampling.top_p < 1 or 0 < sampling.top_k < vocab
        )

    def _check_ids(self, vocab: int) -> None:
        asked = self.sampling
        ids = [*asked.logit_bias, *asked.stop_token_ids, *asked.allowed_token_ids]
        ids += [token for word in asked.bad_words for token in word]
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            raise ValueError(f"token ids must be in the vocabulary of {vocab} tokens")
        if not all(asked.bad_words):
            raise ValueError("bad words must have tokens")

    @property
    def match(self) -> grammar.TokenMatcher | None:
        """Its position in its grammar.

        Raises GrammarError if the grammar does not compile or the output does not fit it.
        """
        return None if self._match is None else self._match.result()

    @property
    def done(self) -> bool:
        """Whether its grammar is complete, so that nothing can follow."""
        return self.match is not None and self.match.done

    @property
    def special(self) -> bool:
        """Whether the logits of the next token have to be modified, beyond the temperature."""
        return self.filtered or self.edited

    @property
    def edited(self) -> bool:
        """Whether the logits of the next token have to be modified, beyond temperature, min_p, top_k and top_p."""
        early = self.index < self.sampling.min_tokens and len(self.stops) > 0
        return bool(
            early
            or (self._match is not None and self._is_bound(self._match))
            or self.counts is not None
            or len(self.biased)
            or self._bans is not None
            or (self._thought is not None and self._thought.forced is not None)
        )

    def _is_bound(self, match: MatcherRequest) -> bool:
        """Whether its grammar has a say in the next token, as far as is known."""
        if self.sampling.grammar is None or self.sampling.grammar.gate is None or not match.ready:
            return True
        try:
            return match.result().binds or not match.result().may_end
        except GrammarError:
            # Whoever samples the row gets the error.
            return True

    def push(self, token: int) -> None:
        """Record the chosen token. Raises GrammarError if it does not fit the grammar."""
        self.index += 1
        if self.counts is not None and self.seen is not None:
            self.counts[token] += 1
            self.seen[token] = True
        if self.match is not None:
            self.match.push(token)
        if self._thought is not None:
            self._thought.push(token)
        if self._bans is not None:
            self._bans.push(token)

    def shape(self, logits: Floats) -> None:
        """Modify the logits in place, all but the temperature; forbidden tokens get -inf. Raises GrammarError."""
        logits[self.biased] += self.bias
        self._apply_penalties(logits)
        self._forbid_tokens(logits)
        # Of a row whose tokens are all forbidden there is nothing to filter; it gets no token.
        if self.filtered and logits.max() > -np.inf:
            self._apply_filters(logits)

    def _apply_penalties(self, logits: Floats) -> None:
        """Apply the repetition, frequency and presence penalties in place."""
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

    def _forbid_tokens(self, logits: Floats) -> None:
        """Set tokens that the request or its grammar forbids, and stop tokens before `min_tokens`, to -inf; or all but
        one that must end a thought.
        """
        match, forced = self.match, None if self._thought is None else self._thought.forced
        # A grammar of the thought itself does not let it end within a character.
        if forced is not None and (match is None or not match.binds or match.token_mask(len(logits))[forced]):
            kept = logits[forced]
            logits[:] = -np.inf
            logits[forced] = kept
            return
        if self._bans is not None:
            self._bans.forbid(logits)
        early = self.index < self.sampling.min_tokens or (match is not None and not match.may_end)
        if match is None or not match.binds:
            if early:
                logits[self.stops] = -np.inf
            return
        begun_s = time.perf_counter()
        allowed = match.token_mask(len(logits))
        self.cost_s = max(time.perf_counter() - begun_s, COST_DECAY * self.cost_s)
        if early:
            longer = allowed.copy()
            longer[self.stops] = False
            # If the grammar allows only the end, `min_tokens` cannot be met.
            allowed = longer if longer.any() else allowed
        logits[~allowed] = -np.inf

    def _apply_filters(self, logits: Floats) -> None:
        """Apply min_p, top_k and top_p to the distribution after temperature, each to what the one before it left."""
        asked = self.sampling
        if asked.min_p > 0:
            scaled = logits.astype(np.float64) / self.heat
            logits[scaled < scaled.max() + math.log(asked.min_p)] = -np.inf
        if 0 < asked.top_k < len(logits):
            _keep_tokens(logits, _largest_logits(logits, asked.top_k))
        if asked.top_p < 1:
            self._apply_top_p(logits)

    def _apply_top_p(self, logits: Floats) -> None:
        """Keep the most likely tokens that together have at least the probability top_p."""
        scaled = logits.astype(np.float64) / self.heat
        peak = scaled.max()
        total = np.exp(scaled - peak).sum()
        for count in (min(TOP_P_PRESORT, len(logits)), len(logits)):
            ordered = _largest_logits(logits, count)
            mass = np.cumsum(np.exp(ordered.astype(np.float64) / self.heat - peak))
            if mass[-1] >= self.sampling.top_p * total:
                break
        # A token stays if the tokens before it have less than top_p together, so the first one always stays.
        _keep_tokens(logits, ordered[: 1 + np.count_nonzero(mass < self.sampling.top_p * total)])


def _largest_logits(logits: Floats, count: int) -> Floats:
    """The `count` largest values in descending order. `_keep_tokens` decides which of several equal ones stay."""
    split = len(logits) - count
    return np.sort(np.partition(logits, split)[split:] if split else logits)[::-1]


def _keep_tokens(logits: Floats, ordered: Floats) -> None:
    """Set all but `len(ordered)` tokens to -inf; `ordered` are the largest logits.

    Of equal ones the lowest ids stay.
    """
    lowest = ordered[-1]
    equals = np.flatnonzero(logits == lowest)
    spare = equals[len(ordered) - np.count_nonzero(logits > lowest) :]
    logits[logits < lowest] = -np.inf
    logits[spare] = -np.inf


class Sampler:
    """Samples tokens for an engine.

    `tokenizer` (from `grammar.build_tokenizer`) is needed only for structured output.
    """

    def __init__(self, vocab_size: int, tokenizer: LLTokenizer | None = None) -> None:
        self.vocab_size = vocab_size
        self.grammars = None if tokenizer is None else GrammarCache(tokenizer)

    def expect(self, seq: Live) -> None:
        """Announce a sequence: its grammar is compiled in the background. Idempotent."""
        asked = seq.sampling.grammar
        if asked is not None and self.grammars is not None and seq.matcher is None:
            seq.matcher = self.grammars.request_matcher(asked, seq.output, seq.tenancy.tenant)

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, whenever an announced sequence has become ready."""
        if self.grammars is not None:
            self.grammars.on_ready = wake

    def warm(self) -> None:
        """Compile or load the drawing kernel, so that no request has to wait for it."""
        logits, heat = np.zeros((1, self.vocab_size), np.float32), np.ones(1)
        _draw_tokens(logits, heat, np.zeros(1, np.uint64), np.empty(1, np.int64))

    def open(self, seq: Live) -> SamplerRow:
        """The sampling state of a sequence, as if the sampler had chosen all of its output so far.

        Raises:
            GrammarError: the grammar does not compile, or the output does not fit it.
            ValueError: a token id is outside the vocabulary.
        """
        if seq.sampling.grammar is not None:
            if self.grammars is None:
                raise GrammarError("structured output is not possible with this model's tokenizer")
            if seq.matcher is not None and seq.matcher.output != seq.output:
                # The output has grown since the sequence was announced.
                seq.matcher = None
            self.expect(seq)
        match = seq.matcher
        if match is not None and match.ready:
            match.result()
        return SamplerRow(seq.prompt, seq.output, seq.sampling, self.vocab_size, match)

    def sample(
        self, logits: Sequence[torch.Tensor], rows: Sequence[SamplerRow]
    ) -> list[SampledToken | Exception]:
        """One token for each row. `logits` are float32 `[1, vocab]` each, and not changed; rows are not advanced.

        A row that cannot be sampled gets an exception instead of a token.
        """
        raw: Floats = stack_logits(logits).cpu().numpy()
        special = [place for place, row in enumerate(rows) if row.special]
        errors: dict[int, Exception] = {}
        shaped = raw.copy() if special else raw
        for place in special:
            try:
                rows[place].shape(shaped[place])
            except Exception as error:
                errors[place] = error
        tokens = _choose_tokens(shaped, rows)
        return [
            errors.get(place) or _sampled_token(raw, place, row, token)
            for place, (row, token) in enumerate(zip(rows, tokens, strict=True))
        ]

    def score(self, logits: torch.Tensor, tokens: list[int], top: int) -> list[Logprob]:
        """The log-probability of `tokens[i]` in row i of float32 `[len(tokens), vocab]`, with the `top` most likely
        tokens, and the token's rank.

        Raises:
            ValueError: the logits are not finite.
        """
        return score_rows(logits.detach().cpu().numpy(), tokens, top, ranked=True)

    def pool(self, row: torch.Tensor, pooling: Pooling, num_tokens: int) -> bytes:
        """What is pooled, computed on the host (`engine.protocols.StepSampler.pool`).

        Raises:
            ValueError: it is not finite.
        """
        return pool_row(row.detach().cpu().numpy()[0], pooling, num_tokens)


def stack_logits(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine rows of `[1, vocab]` to [rows, vocab], where they are: a view if they are adjacent in memory, else a
    copy.
    """
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
    return first.as_strided((len(parts), vocab), (vocab, 1))


def _choose_tokens(logits: Floats, rows: Sequence[SamplerRow]) -> list[int]:
    """The token of each row; -1 if its logits are not finite or allow no token."""
    if not any(row.heat for row in rows):
        # argmax treats NaN as the largest value, so the maximum is finite only if there is no NaN or infinity.
        tokens = logits.argmax(axis=1)
        tokens[~np.isfinite(logits[np.arange(len(rows)), tokens])] = -1
    else:
        tokens = np.empty(len(rows), np.int64)
        heat = np.array([row.heat for row in rows], np.float64)
        starts = [noise_start(row.sampling.seed, row.index) if row.heat else 0 for row in rows]
        _draw_tokens(logits, heat, np.array(starts, np.uint64), tokens)
    chosen: list[int] = tokens.tolist()
    return chosen


def _sampled_token(raw: Floats, place: int, row: SamplerRow, token: int) -> SampledToken | Exception:
    """The token with its log-probability if asked for; an exception if `token` is -1."""
    if token < 0 and np.isfinite(raw[place]).all():
        return BadSamplingParams("the request's sampling parameters leave no token to choose")
    if token < 0:
        return ValueError("the logits are not finite")
    asked = row.sampling.logprobs
    return SampledToken(
        token, None if asked is None else score_rows(raw[place : place + 1], [token], asked)[0]
    )


def _draw_rows(logits: Any, heat: Any, starts: Any, tokens: Any) -> None:
    """Draw a token for each row of `logits` [rows, vocab]: the largest logit / heat + noise, or logit if heat is 0.

    A row gets -1 if it has a NaN or +inf, or nothing above -inf. Scalar operations in the order of ids, so that a row's
    result does not depend on its place in the batch.
    """
    golden, mix1, mix2 = np.uint64(GOLDEN), np.uint64(MIX1), np.uint64(MIX2)
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
            # Uniform in (0, 1), and exactly representable.
            uniform = (np.float64(bits >> np.uint64(12)) + 0.5) * 2.0**-52
            # The noise is at most -log(1 - u), and e**d > 1 + d + d*d/2 + d*d*d/6: so most tokens need no logarithm.
            gap = best - height
            if gap > 0.0 and (1.0 - uniform) * (1.0 + gap * (1.0 + gap * (0.5 + gap / 6.0))) > 1.0 + 1e-9:
                continue
            score = height - math.log(-math.log(uniform))
            if score > best:
                best, chosen = score, token
        tokens[row] = chosen if sound else -1


# No fastmath: sums are compared here, and must be the same on every machine.
_draw_tokens = cast("Callable[[Any, Any, Any, Any], None]", cached(_draw_rows))
