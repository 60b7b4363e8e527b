"""Samples tokens from logits that lie on a device, in plain torch, over many rows at once.

The tokens are those of `engine.sampling.sampler.Sampler`, to the last one, whatever the batch and the device:

- Noise, temperature, min_p and top_k are exact. The hash is the same in wrapping int64; logits are divided in float64,
  and equal logits are ordered by their ids. On CPUs and on CUDA these operations round alike.
- Sums (top_p) and logarithms (the noise) may round otherwise than on the host. So a row is decided here only if no such
  rounding can change the decision: if no sum of probabilities lies within `_sum_doubt` of the limit of top_p, and no
  score within `_score_doubt` of the best one. `Sampler` decides all other rows. Nothing else is assumed but that `exp`
  and `log` in float64 are off by a few units in the last place at most, as torch's and CUDA's are.
- A row whose logits are not finite, or which has no token to choose, is such a row too, and gets its error there.
- Greedy rows take the first of equal maxima, as torch promises.

How many rows are in doubt: one in 10**5 with top_p over flat logits of a large vocabulary, else far fewer; but each row
whose logits are all equal and whose top_p ends exactly between two tokens.

Rows with a grammar, penalties, bias, minimum tokens or log-probabilities go through `Sampler` on the host, where only
their logits are copied. Of all others, one number each is copied to the host, once for the whole step. If `NARROW`
candidates do not suffice for top_k or top_p, which is rare, a second pass looks at the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from diptych.messages import Logprob
from diptych.request import Pooling, SamplingParams
from engine.model.device_step import SAMPLED_LOGITS, SAMPLER_ARRAYS
from engine.protocols import SampledToken
from engine.sampling.sampler import GOLDEN, MIX1, MIX2, Sampler, SamplerRow, noise_start, stack_logits
from engine.sequence import Sequence as Live

# Candidates for top_k and top_p in the first pass: the largest logits of a row.
NARROW = 1024
# Logits that are processed at a time, in whole rows. On a GPU a block has to be large, since every operation costs a
# launch, and an array of it should fit into the cache of 50 MB; on a CPU into that of a core.
CUDA_BLOCK, CPU_BLOCK = SAMPLED_LOGITS, 1 << 17

# Instead of a token: `Sampler` has to decide; or more candidates are needed.
UNDECIDED, WIDER = -1, -2
# Token ids are below it; 32 bits.
_ID_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class DrawParams:
    """The parameters of some rows, on their device; each tensor is [rows, 1]."""

    heat: torch.Tensor  # float64: the temperature
    starts: torch.Tensor  # int64: `noise_start` of each row
    log_min_p: torch.Tensor  # float64; -inf without min_p
    top_p: torch.Tensor  # float64; 1 without top_p
    top_k: torch.Tensor  # int64; the vocabulary without top_k
    # Whether any row has min_p; whether any has top_p without top_k.
    has_min_p: bool
    has_bare_top_p: bool

    @classmethod
    def pack(cls, rows: Sequence[SamplerRow], vocab: int, device: torch.device) -> DrawParams:
        """Those of `rows`, copied to `device` at once."""
        asked = [row.sampling for row in rows]
        limited = [0 < one.top_k < vocab for one in asked]
        packed = np.empty((5, len(rows)), np.int64)
        floats = packed.view(np.float64)
        floats[0] = [row.heat for row in rows]
        packed.view(np.uint64)[1] = [noise_start(row.sampling.seed, row.index) for row in rows]
        floats[2] = [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in asked]
        floats[3] = [one.top_p for one in asked]
        packed[4] = [one.top_k if few else vocab for one, few in zip(asked, limited, strict=True)]
        ints = torch.from_numpy(packed).to(device)[:, :, None]
        doubles = ints.view(torch.float64)
        return cls(
            doubles[0],
            ints[1],
            doubles[2],
            doubles[3],
            ints[4],
            any(one.min_p > 0 for one in asked),
            any(one.top_p < 1 and not few for one, few in zip(asked, limited, strict=True)),
        )

    def cut_rows(self, begin: int, end: int) -> DrawParams:
        """Those of the rows from `begin` to `end`."""
        columns = (self.heat, self.starts, self.log_min_p, self.top_p, self.top_k)
        heat, starts, log_min_p, top_p, top_k = (column[begin:end] for column in columns)
        return DrawParams(heat, starts, log_min_p, top_p, top_k, self.has_min_p, self.has_bare_top_p)


class DeviceSampler:
    """Samples as `Sampler` does, but most rows where their logits are: a `StepSampler` for logits on `device`.

    Args:
        sampler: opens rows and scores, and samples the rows that this one does not.
        device: where logits are.
        block: how many logits to process at a time, in whole rows; None: by the device.
    """

    def __init__(self, sampler: Sampler, device: torch.device | str, block: int | None = None) -> None:
        self.sampler, self.vocab_size = sampler, sampler.vocab_size
        self.device = torch.device(device)
        # Rows that `Sampler` decided, although nothing in their requests asked for it.
        self.undecided = 0
        self._block = block or (CUDA_BLOCK if self.device.type == "cuda" else CPU_BLOCK)
        steps = np.arange(1, self.vocab_size + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        # [1, vocab]: what the hash adds to the start of a row for each token.
        self._steps = torch.from_numpy(steps.view(np.int64)).to(self.device)[None]

    @property
    def scratch_bytes(self) -> int:
        """Most memory that sampling takes on the device for a while, beside the logits."""
        return SAMPLER_ARRAYS * 8 * max(self._block, self.vocab_size)

    def expect(self, seq: Live) -> None:
        """Announce a sequence, as `Sampler.expect`."""
        self.sampler.expect(seq)

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake` as `Sampler.notify` does."""
        self.sampler.notify(wake)

    def open(self, seq: Live) -> SamplerRow:
        """The sampling state of a sequence.

        Raises:
            GrammarError, ValueError: as `Sampler.open`.
        """
        return self.sampler.open(seq)

    def score(self, logits: torch.Tensor, tokens: list[int], top: int) -> list[Logprob]:
        """Log-probabilities, computed on the host.

        Raises:
            ValueError: as `Sampler.score`.
        """
        return self.sampler.score(logits, tokens, top)

    def pool(self, row: torch.Tensor, pooling: Pooling, num_tokens: int) -> bytes:
        """What is pooled, computed on the host.

        Raises:
            ValueError: as `Sampler.pool`.
        """
        return self.sampler.pool(row, pooling, num_tokens)

    def warm(self) -> None:
        """Load what the first rows would have to wait for, on the host and on the device."""
        self.sampler.warm()
        logits = torch.arange(self.vocab_size, dtype=torch.float32, device=self.device)[None]
        asked = [
            SamplingParams(1, 0, temperature=0.0),
            SamplingParams(1, 0),
            SamplingParams(1, 0, min_p=0.1, top_p=0.4),
            SamplingParams(1, 0, top_k=NARROW + 1, top_p=0.4),
        ]
        rows = [SamplerRow([0], [], one, self.vocab_size, None) for one in asked]
        self.sample([logits] * len(rows), rows)

    def sample(
        self, logits: Sequence[torch.Tensor], rows: Sequence[SamplerRow]
    ) -> list[SampledToken | Exception]:
        """One token for each row. `logits` are float32 `[1, vocab]` each, and not changed; rows are not advanced.

        A row that cannot be sampled gets an exception instead of a token.
        """
        groups = self._group_rows(rows)
        hosted = groups.pop(None, [])
        with torch.no_grad():
            started = [self._start(draw, logits, rows, places) for draw, places in groups.items()]
            # The host is busy with its rows while the device computes.
            results = self._sample_on_host(logits, rows, hosted)
            tokens = _fetch_tokens(groups.values(), started)
            wider = [place for place, token in tokens.items() if token == WIDER]
            if wider:
                more = self._start(self._draw_wide, logits, rows, wider)
                tokens.update(_fetch_tokens([wider], [more]))
        undecided = [place for place, token in tokens.items() if token == UNDECIDED]
        self.undecided += len(undecided)
        results.update(self._sample_on_host(logits, rows, undecided))
        return [results.get(place) or SampledToken(tokens[place]) for place in range(len(rows))]

    def _group_rows(self, rows: Sequence[SamplerRow]) -> dict[DrawFunction | None, list[int]]:
        """The places of rows by how they are drawn; None: on the host."""
        groups: dict[DrawFunction | None, list[int]] = {}
        for place, row in enumerate(rows):
            groups.setdefault(self._choose_draw(row), []).append(place)
        return groups

    def _choose_draw(self, row: SamplerRow) -> DrawFunction | None:
        """How a row's token is drawn."""
        asked = row.sampling
        if row.edited or asked.logprobs is not None:
            return None
        if not row.heat:
            return self._choose_greedy
        limited = 0 < asked.top_k < self.vocab_size
        if limited and asked.top_k > NARROW:
            return self._draw_wide
        return self._draw_narrow if limited or asked.top_p < 1 else self._draw_all

    def _start(
        self,
        draw: DrawFunction | None,
        logits: Sequence[torch.Tensor],
        rows: Sequence[SamplerRow],
        places: list[int],
    ) -> torch.Tensor:
        """Draw for the rows at `places`, block by block; returns what is to be fetched, int64 [len(places)]."""
        assert draw is not None
        whole = stack_logits([logits[place] for place in places])
        params = DrawParams.pack([rows[place] for place in places], self.vocab_size, self.device)
        size = max(1, self._block // self.vocab_size)
        parts = [
            draw(whole[begin : begin + size], params.cut_rows(begin, begin + size))
            for begin in range(0, len(places), size)
        ]
        return torch.cat(parts)

    def _sample_on_host(
        self, logits: Sequence[torch.Tensor], rows: Sequence[SamplerRow], places: list[int]
    ) -> dict[int, SampledToken | Exception]:
        """What `Sampler` chooses at `places`; only their logits are copied."""
        if not places:
            return {}
        picks = self.sampler.sample([logits[place] for place in places], [rows[place] for place in places])
        return dict(zip(places, picks, strict=True))

    def _choose_greedy(self, logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
        """The first of the largest logits of each row."""
        # NaN counts as the largest.
        tokens = logits.argmax(dim=1, keepdim=True)
        return torch.where(logits.gather(1, tokens).isfinite(), tokens, UNDECIDED)[:, 0]

    def _draw_all(self, logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
        """Draw among all tokens of each row, or those that min_p leaves."""
        peak = logits.amax(dim=1, keepdim=True)
        heights = logits.double().div_(params.heat)
        if params.has_min_p:
            heights.masked_fill_(heights < peak.double() / params.heat + params.log_min_p, -math.inf)
        tokens, sure = _take_best(heights.sub_(_negative_noise(params.starts + self._steps)))
        return torch.where(sure & peak[:, 0].isfinite(), tokens, UNDECIDED)

    def _draw_narrow(self, logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
        """Draw among what the filters leave, if `NARROW` candidates suffice."""
        return self._draw_filtered(logits, params, min(NARROW, self.vocab_size))

    def _draw_wide(self, logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
        """Draw among what the filters leave, where every token is a candidate."""
        return self._draw_filtered(logits, params, self.vocab_size)

    def _draw_filtered(self, logits: torch.Tensor, params: DrawParams, count: int) -> torch.Tensor:
        """Draw among what min_p, top_k and top_p leave of the `count` most likely tokens of each row."""
        ids = _order_tokens(logits, count)
        heights = logits.gather(1, ids).double().div_(params.heat)
        # [rows, 1]: as likely as the most likely token, and as unlikely as min_p allows.
        peak = heights[:, :1].clone()
        floor = peak + params.log_min_p
        kept = (heights >= floor) & (torch.arange(count, device=self.device) < params.top_k)
        mass = (heights - peak).exp_().masked_fill_(~kept, 0.0).cumsum_(dim=1)
        total = mass[:, -1:]
        if params.has_bare_top_p and count < self.vocab_size:
            scaled = logits.double().div_(params.heat)
            left = (scaled - peak).exp_().masked_fill_(scaled < floor, 0.0).sum(dim=1, keepdim=True)
            total = torch.where(params.top_k < self.vocab_size, total, left)
        limit, filtered = params.top_p * total, params.top_p < 1
        # A token stays if those before it have less than top_p together.
        kept[:, 1:] &= (mass[:, :-1] < limit) | ~filtered
        unclear = ((mass - limit).abs_() <= total * _sum_doubt(self.vocab_size)).any(dim=1) & filtered[:, 0]
        short = (mass[:, -1] < limit[:, 0]) & filtered[:, 0]
        noise = _negative_noise(params.starts + self._steps[0][ids])
        places, sure = _take_best(heights.sub_(noise).masked_fill_(~kept, -math.inf))
        tokens = ids.gather(1, places[:, None])[:, 0]
        # NaN can be anywhere in the order, but is the largest for amax.
        finite = logits.amax(dim=1).isfinite()
        tokens = torch.where(sure & finite & ~unclear, tokens, UNDECIDED)
        return tokens if count == self.vocab_size else torch.where(short & finite, WIDER, tokens)


# Draws a token, or a negative number, for each row of logits: int64 [rows].
DrawFunction = Callable[[torch.Tensor, DrawParams], torch.Tensor]


def _fetch_tokens(groups: Iterable[list[int]], started: list[torch.Tensor]) -> dict[int, int]:
    """Token by place: waits for the device, and copies one number per row."""
    places = [place for group in groups for place in group]
    return dict(zip(places, torch.cat(started).tolist() if started else [], strict=True))


def _order_tokens(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest logits of each row [rows, count], in descending order; of equal ones by ascending id.

    Logits must not be NaN. They are ordered as integers, with the id in the lower bits, so that no two are equal.
    """
    # -0.0 becomes 0.0, which is as large.
    bits = (logits + 0.0).view(torch.int32)
    # Of negative numbers, the larger integer is the smaller number.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered.long() << 32) + (_ID_MASK - ids)
    whole = count == logits.shape[1]
    largest = keys.sort(dim=1, descending=True)[0] if whole else keys.topk(count, dim=1)[0]
    return _ID_MASK - (largest & _ID_MASK)


def _negative_noise(z: torch.Tensor) -> torch.Tensor:
    """log(-log(u)), where u in (0, 1) comes from the hash of `z` (int64, changed); Gumbel noise but for its sign."""
    z ^= _shift_right(z, 30)
    z *= _signed(MIX1)
    z ^= _shift_right(z, 27)
    z *= _signed(MIX2)
    z ^= _shift_right(z, 31)
    # (bits + 0.5) * 2**-52, exactly, in one operation.
    half = torch.tensor(2.0**-53, dtype=torch.float64)
    return torch.add(half, _shift_right(z, 12), alpha=2.0**-52).log_().neg_().log_()


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """The logical shift of 64 bits, which torch has for signed integers only as an arithmetic one."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The signed integer with the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number


def _take_best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of the best score of each row, and whether rounding cannot have made it the best one."""
    best, places = scores.max(dim=1, keepdim=True)
    near = (scores >= best - _score_doubt(best)).sum(dim=1)
    return places[:, 0], best[:, 0].isfinite() & (near == 1)


def _score_doubt(best: torch.Tensor) -> torch.Tensor:
    """How far a score may be off: 2**-50 of itself; and the noise, which is below 37, by 10**-12, thirty times what two
    logarithms of one unit in the last place cost.
    """
    return best.abs() * 2.0**-50 + 1e-12


def _sum_doubt(vocab: int) -> float:
    """How far two sums of `vocab` positive numbers may be apart, added in any order, relative to the sum: each addition
    costs half a unit in the last place at most, and the exponentials a few.
    """
    return (vocab + 64) * 2.0**-52
