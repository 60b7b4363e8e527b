"""The work of one sequence in one step, as the model runner gets it. No torch, since the simulator uses it too."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import KeepSpec, decision_tokens
from engine.sequence import Sequence
from kvcache.layout import KvLayout

# Most rows of a step whose kernels one kernel calls (`engine.cpu.fused_step`). Beyond, the way between kernels takes a
# few percent of a step.
MAX_FUSED_ROWS = 128
# What a work may return in place of logits: the hidden state behind the last layer of its last or first token, or the
# sum of all.
POOLED_ROWS = LAST_ROW, FIRST_ROW, SUMMED_ROWS = ("last_hidden", "first_hidden", "summed_hidden")


@dataclass(frozen=True, slots=True)
class KeptWork:
    """What the runner has to know of a sequence whose KV is evicted per head (FastGen, section 3).

    `key` names the sequence; its prompt has `prompt_tokens` tokens. Before eviction (`evicted` is False) the runner
    only records the queries of the last prompt rows. Afterwards the sequence's slabs are the whole chunks of its first
    `spec.boundary` tokens, then `segment_slabs` of segments (`kvcache.eviction.kept_segments`), then one slab that the
    newest tokens are written to in turn (position p to row p % 64), then the slabs of its bag.
    """

    key: str
    prompt_tokens: int
    spec: KeepSpec
    evicted: bool
    segment_slabs: int = 0

    @property
    def ring_place(self) -> int:
        """Where the slab of the newest tokens is among those of the sequence, once it is evicted."""
        return self.spec.boundary_chunks + self.segment_slabs


@dataclass(frozen=True, slots=True)
class StepWork:
    """Compute `tokens` at positions `start` to `start + len(tokens) - 1` of a sequence.

    `slabs` have room for at least `start + len(tokens)` tokens, and contain the KV of positions 0 to `start - 1`.
    `logits` says which rows of logits are returned: of the "last" token, of "all" tokens, or "none"; or in their place
    one row of hidden states (`POOLED_ROWS`). `first_token` is the id of the sequence's token 0, whose KV pools with a
    codec keep exactly; None: that of `tokens`, if `start` is 0.
    `kept` is given for sequences whose KV is evicted. After eviction each of `tokens` is a decode row of its own, whose
    result does not depend on the others, and all of them lie between two decision points.
    """

    tokens: list[int]
    start: int
    slabs: list[int]
    logits: str
    first_token: int | None = None
    kept: KeptWork | None = None

    @property
    def sink_token(self) -> int | None:
        """The id of the sequence's token 0, or None if it is unknown."""
        return self.tokens[0] if self.first_token is None and self.start == 0 else self.first_token

    @property
    def wanted(self) -> int:
        """Number of rows that are returned."""
        if self.logits == "all":
            return len(self.tokens)
        return int(self.logits != "none")

    @property
    def pooled_rows(self) -> tuple[int, int] | None:
        """The first of the tokens whose hidden states are added up, and how many these are; None: logits are wanted."""
        if self.logits not in POOLED_ROWS:
            return None
        count = len(self.tokens)
        return {LAST_ROW: (count - 1, 1), FIRST_ROW: (0, 1), SUMMED_ROWS: (0, count)}[self.logits]

    @property
    def is_plain_decode(self) -> bool:
        """Whether it is one token whose logits are wanted, of a sequence that keeps all its KV."""
        return self.logits == "last" and self.kept is None and len(self.tokens) == 1


def kept_work(seq: Sequence) -> KeptWork | None:
    """What the runner has to know of `seq` if its heads may drop KV; None if nothing is dropped."""
    if not seq.keep.evicts:
        return None
    segment_slabs = seq.lead_slabs - seq.keep.boundary_chunks
    return KeptWork(seq.key, len(seq.prompt), seq.keep, seq.kept_slabs > 0, segment_slabs)


def choose_logits(seq: Sequence, count: int, scores: bool) -> str:
    """Which logits are needed when the next `count` tokens of `seq` are computed; `scores`: its prompt is being
    scored.
    """
    if seq.sampling.pooling is not None:
        return _choose_pooled(seq, count, seq.sampling.pooling.kind)
    if scores and seq.computed + 1 < len(seq.prompt):
        return "all"
    draws = len(seq.output) < seq.sampling.max_tokens and not seq.defer_first
    return "last" if seq.pending == count and draws else "none"


def _choose_pooled(seq: Sequence, count: int, kind: str) -> str:
    """The rows that are needed of the next `count` tokens of a sequence that is pooled."""
    if kind == "mean":
        return SUMMED_ROWS
    if kind == "cls":
        return FIRST_ROW if seq.computed == 0 else "none"
    if seq.pending != count:
        return "none"
    return "last" if kind == "score" else LAST_ROW


@dataclass(frozen=True, slots=True)
class RunnerBounds:
    """The limits of a model runner, for checking its input."""

    layout: KvLayout
    num_slabs: int
    max_model_len: int
    vocab_size: int

    def check(self, work: StepWork) -> None:
        """Check `work`.

        Raises ValueError if it is empty, too long, has too few slabs, unknown slabs or tokens, or, for a pool with a
        codec, if its first token is unknown. Tokens and slabs of a work with `kept` have to be as `KeptWork` and
        `StepWork` say.
        """
        end = work.start + len(work.tokens)
        if not work.tokens or work.start < 0 or end > self.max_model_len:
            raise ValueError(f"positions {work.start}..{end - 1} are not within 0..{self.max_model_len - 1}")
        if work.kept is not None:
            self._check_kept(work, work.kept, end)
        if self.layout.num_chunks(end) > len(work.slabs) and not (work.kept and work.kept.evicted):
            raise ValueError(f"{end} tokens do not fit into {len(work.slabs)} slabs")
        if work.logits not in ("last", "all", "none", *POOLED_ROWS):
            raise ValueError(f"logits are 'last', 'all' or 'none', or pooled rows, not {work.logits!r}")
        if min(work.slabs) < 0 or max(work.slabs) >= self.num_slabs:
            raise ValueError(f"slabs {work.slabs} are not all in a pool of {self.num_slabs}")
        if (
            self.layout.codec
            and not 0 <= (-1 if work.sink_token is None else work.sink_token) < self.vocab_size
        ):
            raise ValueError(f"a pool of {self.layout.codec} needs the sequence's first token")
        if min(work.tokens) < 0 or max(work.tokens) >= self.vocab_size:
            raise ValueError(f"token ids are not all within 0..{self.vocab_size - 1}")

    def _check_kept(self, work: StepWork, kept: KeptWork, end: int) -> None:
        """Check what a work says about eviction; `end` is the number of tokens with KV after it."""
        prompt = kept.prompt_tokens
        if not kept.spec.boundary <= prompt:
            raise ValueError(f"the first {kept.spec.boundary} tokens cannot be kept of a prompt of {prompt}")
        if not kept.evicted:
            if end > prompt:
                raise ValueError(f"position {end - 1} comes after eviction, at {prompt} tokens")
        elif work.start < prompt or end > decision_tokens(prompt, work.start) + CHUNK_TOKENS:
            raise ValueError(
                f"positions {work.start}..{end - 1} of an answer from {prompt} on are not within one block"
            )
        elif len(work.slabs) < kept.ring_place + 2:
            raise ValueError(
                f"{len(work.slabs)} slabs are too few for {kept.ring_place} before a ring and a bag"
            )
