"""The sequence, the engine's unit of scheduling: one attempt to continue one prompt. Also the limits of an engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import DiptychError
from diptych.eviction_spec import KEEP_ALL, RING_AND_MAP, KeepSpec, decision_tokens
from diptych.request import SamplingParams, Tenancy
from kvcache.eviction.kept_segments import KeptSegment, count_segment_slabs
from kvcache.prefix_tree import chunk_keys


def num_chunks(tokens: int) -> int:
    """Number of slabs that hold `tokens` tokens."""
    return -(-tokens // CHUNK_TOKENS)


class SequenceRefused(DiptychError):
    """The engine refuses a sequence. `code` is a code of `diptych.messages.Failed`."""

    def __init__(self, code: str, what: str, why: str = "") -> None:
        super().__init__(what, why)
        self.code = code


@dataclass(slots=True)
class Sequence:
    """One attempt to continue one prompt, and its progress.

    `output` may begin with tokens that an earlier attempt delivered; they are prefilled together with the prompt.
    `hold_kv`: the sequence leaves the engine after one token, with its slabs, and another engine continues it; with
    `defer_first` it leaves without a token. `stage`: its KV is announced while it is computed
    (`engine.protocols.KvObserver`). Tokens 0 to `computed` - 1 have KV, token
    i in slab `slabs[i // 64]`; prefill ends at `target` tokens, and then decode begins.

    `kv_class` names the arena that its KV is in (`kvcache.arenas`); it never changes.
    `root` is the address before its first chunk in the prefix tree, empty if its chunks are never shared; `keys` are
    the addresses of its full chunks so far, of which the first `shared` are in the tree.

    `keep` says what its heads may drop. If they may, the sequence *evicts*: at each decision point
    (`diptych.eviction_spec`) its heads drop rows, and it gives slabs back. From then on `slabs` are the whole chunks
    before the boundary, segments (`kvcache.eviction.kept_segments`), one slab as a ring (for positions since the last
    decision, p in row p % 64), and a bag with the rows that each head keeps. What is computed from then on has no
    addresses. No step crosses a decision point. With `cuts_kept` it is offered with segments.
    """

    id: str
    epoch: int
    prompt: list[int]
    sampling: SamplingParams
    # Latest time at which it may end, in seconds on the clock of `now_s`.
    deadline_s: float
    output: list[int] = field(default_factory=list)
    hold_kv: bool = False
    defer_first: bool = False
    stage: bool = False
    slabs: list[int] = field(default_factory=list)
    computed: int = 0
    tenancy: Tenancy = Tenancy()
    root: bytes = b""
    keys: list[bytes] = field(default_factory=list)
    shared: int = 0
    # Number of tokens whose KV was found in the prefix tree instead of computed.
    cached: int = 0
    # Whether it was preempted, with its KV in the host tier.
    parked: bool = False
    # Number of its leading chunks that are not in the host tier, since other sequences held them.
    parked_from: int = 0
    # Number of tokens at which its prefill ends. The scheduler sets it when the sequence is added, adopted or
    # preempted.
    target: int = 0
    # The request for its compiled grammar (a `engine.sampling.grammar_cache.MatcherRequest`), or None.
    matcher: Any = None
    # The kernels that it needs to evict, if they may still be missing (a `engine.protocols.Preparation`), or None.
    kernels: Any = None
    # The KV of its prefix that is read back from a lower tier (a `engine.prefix_restores.PrefixRestore`), or None.
    restore: Any = None
    # Its number in order of arrival: a lower number came earlier.
    number: int = 0
    arrived_s: float = 0.0
    started_s: float | None = None
    # Whether its KV came from another worker; set when it starts.
    fetched: bool = False
    # Whether nothing has been emitted for it yet.
    silent: bool = True
    kv_class: str = ""
    keep: KeepSpec = KEEP_ALL
    cuts_kept: bool = False
    # The segments before its ring, and the addresses of their slabs; none of either before its first decision point.
    segments: tuple[KeptSegment, ...] = ()
    segment_keys: list[bytes] = field(default_factory=list)
    # Number of slabs of its ring and its bag; 0 before its first decision point.
    kept_slabs: int = 0
    # What its last decision kept (`engine.protocols.EvictionReport`), or None.
    eviction: Any = None
    # Its name in the engine and in `KvAllocator`.
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = f"{self.id}#{self.epoch}"

    @property
    def total(self) -> int:
        """Number of tokens known so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Number of known tokens without KV; 1 for a sequence that decodes."""
        return len(self.prompt) + len(self.output) - self.computed

    @property
    def unprefilled_tokens(self) -> int:
        """Number of tokens to compute when it leaves the queue, unless the prefix tree has some of them."""
        return self.pending if self.parked else self.total

    @property
    def decoding(self) -> bool:
        """Whether its prefill is complete and its first token was sampled here."""
        return self.computed >= self.target < len(self.prompt) + len(self.output)

    @property
    def wants_token(self) -> bool:
        """Whether all its tokens have KV and it may generate another one."""
        written = len(self.output)
        done = len(self.prompt) + written == self.computed
        return done and written < self.sampling.max_tokens and not self.defer_first

    @property
    def precedence(self) -> tuple[int, int]:
        """Sort key for memory: sequences with a lower key keep it longer. Priority, then arrival."""
        return self.tenancy.priority, self.number

    @property
    def ready(self) -> bool:
        """Whether it can start; False while its grammar, or the kernels that it needs to evict, are being compiled, and
        while KV of its prefix is read back.
        """
        return all(one is None or one.ready for one in (self.matcher, self.kernels, self.restore))

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt tokens have to be scored, so that each of them must be computed here.

        If their KV came from elsewhere, they were scored there.
        """
        return self.sampling.prompt_logprobs is not None and not (self.output or self.fetched)

    @property
    def pools_all_rows(self) -> bool:
        """Whether it is pooled over more than its last token, so that each token must be computed here."""
        pooling = self.sampling.pooling
        return pooling is not None and pooling.kind in ("mean", "cls")

    def tokens(self, start: int, count: int) -> list[int]:
        """The token ids at positions `start` to `start + count - 1`, across prompt and output."""
        split, end = len(self.prompt), start + count
        return self.prompt[start:end] + self.output[max(0, start - split) : max(0, end - split)]

    def update_keys(self) -> list[bytes]:
        """Extend `keys` to all full chunks of the tokens known by now, and return them.

        If the sequence evicts, chunks with tokens of the output have none.
        """
        output = [] if self.keep.evicts else self.output
        if self.root and len(self.keys) < (len(self.prompt) + len(output)) // CHUNK_TOKENS:
            chunk_keys(self.prompt + output, self.root, self.keys)
        return self.keys

    def attachable_keys(self) -> list[bytes]:
        """Addresses of the chunks that need not be computed if they are cached.

        The last token always is computed, for its logits; if the sequence evicts, so are the rows of its prompt by
        which its heads judge.
        """
        if (self.scores_prompt or self.pools_all_rows) and not self.parked:
            return []
        if self.parked or self.kept_slabs:
            return self.first_keys(self.full_chunks(self.computed))
        last = self.total - 1
        if self.keep.evicts:
            last = min(last, self.keep.attachable_tokens(len(self.prompt)))
        return self.keys[: max(0, last) // CHUNK_TOKENS]

    def first_keys(self, count: int) -> list[bytes]:
        """Addresses of the first `count` of the slabs that may be shared (`full_chunks`), as far as they are known."""
        if self.kept_slabs and self.segment_keys:
            return [*self.keys[: self.keep.boundary_chunks], *self.segment_keys][:count]
        return self.keys[:count]

    def full_chunks(self, tokens: int) -> int:
        """How many of its leading slabs may be shared when `tokens` tokens have KV: full and whole chunks, segments."""
        if self.kept_slabs:
            return self.keep.boundary_chunks + len(self.segment_keys)
        return (min(tokens, len(self.prompt)) if self.keep.evicts else tokens) // CHUNK_TOKENS

    # ---- slabs

    @property
    def capacity(self) -> int:
        """Number of tokens that its slabs have room for; an evicted one's ring has, up to the next decision point."""
        if self.kept_slabs:
            return decision_tokens(len(self.prompt), self.computed) + CHUNK_TOKENS
        return len(self.slabs) * CHUNK_TOKENS

    @property
    def lead_slabs(self) -> int:
        """Number of slabs before its ring, if it is evicted: whole chunks and segments."""
        return self.keep.boundary_chunks + (count_segment_slabs(self.segments) if self.kept_slabs else 0)

    @property
    def bag_slabs(self) -> list[int]:
        """The slabs of its bag, once it is evicted."""
        return self.slabs[self.lead_slabs + 1 :] if self.kept_slabs else []

    @property
    def kept_rows_slabs(self) -> list[int]:
        """The slabs with all rows that its heads keep, once it is evicted: those of segments, then its bag."""
        if not self.kept_slabs:
            return []
        return self.slabs[self.keep.boundary_chunks : self.lead_slabs] + self.bag_slabs

    def slabs_for(self, tokens: int) -> int:
        """Number of slabs that it holds when `tokens` tokens have KV, before anything more is decided."""
        if self.kept_slabs and tokens > len(self.prompt):
            return self.lead_slabs + self.kept_slabs
        return num_chunks(tokens)

    def needed_slabs(self, ahead: int) -> int:
        """Number of slabs to take before up to `ahead` more tokens are computed in one step."""
        return max(
            0, self.slabs_for(self.computed + self.step_tokens(self.computed, ahead)) - len(self.slabs)
        )

    def expected_slabs(self, tokens: int, intact: bool = True) -> int:
        """Number of slabs that it is expected to need until `tokens` tokens have KV.

        Heads of an evicted sequence are expected to keep the share of new tokens that they keep of all; before that,
        everything. `intact` is False if its parked KV is of no use, so that all KV is computed again.
        """
        prompt, whole = len(self.prompt), num_chunks(tokens)
        if not self.keep.evicts or tokens < prompt:
            return whole
        if self.kept_slabs and intact:
            # KV on the way from elsewhere was evicted at the last decision point before its last token.
            known = self.computed if self.computed >= prompt else self.total - 1
            decided, held = decision_tokens(prompt, known), self.lead_slabs + self.kept_slabs
            chunks = max(1, num_chunks(decided - self.keep.boundary))
            kept = held - self.keep.boundary_chunks - 1
            grown = max(0, decision_tokens(prompt, tokens) - decided) // CHUNK_TOKENS
            # Those of a bag on its way, or on smaller ranks, may be more than all its tokens are expected to need.
            return min(held + ceil(kept * grown / chunks), max(held, whole + RING_AND_MAP))
        return whole + RING_AND_MAP

    @property
    def is_adoptable(self) -> bool:
        """Whether its slabs have the KV of all its tokens but the last, so that another engine's work can go on here.

        An evicted one has the KV of the tokens up to its last decision point; the rest, at most 64, are computed again.
        """
        if self.hold_kv:
            return False
        if self.keep.evicts:
            if not self.output:
                # The KV that its prompt's last token saw is not there any more.
                return False
            decided = decision_tokens(len(self.prompt), self.total - 1)
            return (
                self.kept_slabs > 1
                and self.computed == decided
                and len(self.slabs) == self.slabs_for(self.total)
            )
        return self.pending == 1 and len(self.slabs) >= num_chunks(self.computed)

    # ---- decision points

    def step_tokens(self, start: int, count: int) -> int:
        """How many of the `count` tokens from `start` on one step may compute: none behind a decision point."""
        if not self.keep.evicts:
            return count
        prompt = len(self.prompt)
        end = prompt if start < prompt else decision_tokens(prompt, start) + CHUNK_TOKENS
        return min(count, end - start)

    @property
    def decides_next(self) -> bool:
        """Whether the token that it decodes next brings it to a decision point."""
        return bool(self.kept_slabs) and self.computed + 1 == self.capacity

    @property
    def must_decide(self) -> bool:
        """Whether, after the last step, its heads have to decide what they keep, since its answer goes on.

        A sequence that ends with its next token needs no slabs any more, so nothing is decided for it.
        """
        if not self.keep.evicts or self.computed != decision_tokens(len(self.prompt), self.computed):
            return False
        return self.pending > 0 or len(self.output) + 1 < self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of one engine. Lengths are in tokens.

    `arena_slabs` are the slabs of each KV class of a worker with several; `num_slabs` is their sum. It is empty for a
    worker with one class: its sequences all share one arena, whatever their class is called.

    `saturation_tokens` (L_m) is the size of a step that only prefills: the smallest that keeps the device busy
    (`engine.scheduling.saturation`); 0 means the whole budget. `tpot_s` is how many seconds a step may take while any
    sequence decodes in it; None: no limit. `max_evicting` is how many sequences that evict may have KV here, parked
    ones included, since the runner remembers something of each beside the pool; None: no limit.
    """

    num_slabs: int
    max_model_len: int
    max_num_seqs: int = 64
    # Most tokens of a step, over all sequences.
    max_num_batched_tokens: int = 512
    # False: prompts are prefilled whole. A prompt that is longer than `max_num_batched_tokens` is then the only
    # prompt of its step.
    chunked_prefill: bool = True
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    saturation_tokens: int = 0
    tpot_s: float | None = None
    max_evicting: int | None = None
    arena_slabs: Mapping[str, int] = field(default_factory=dict)
    # Slabs that a sequence which evicts may need beyond those of its tokens, by the name of its arena, where that is
    # not `RING_AND_MAP` (`kvcache.eviction.kept_rows.most_extra_slabs`).
    extra_slabs: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Every running sequence may decode one token per step. A larger budget also lets prefill progress beside them.
        if not 0 < self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must be positive and at most"
                f" max_num_batched_tokens ({self.max_num_batched_tokens})"
            )

    @property
    def kv_classes(self) -> tuple[str, ...]:
        """The classes that have arenas of their own; one without a name if there is only one arena."""
        return tuple(self.arena_slabs) or ("",)

    def arena_name(self, seq: Sequence) -> str:
        """Which of `kv_classes` the KV of `seq` belongs to."""
        return seq.kv_class if self.arena_slabs else ""

    def select_arena(self, seqs: Collection[Sequence], name: str) -> Collection[Sequence]:
        """Those of `seqs` whose KV is in one arena; all of them if there is only one."""
        return [seq for seq in seqs if seq.kv_class == name] if self.arena_slabs else seqs

    def slabs_for(self, seq: Sequence) -> int:
        """All slabs of the arena of `seq`; 0 if there is none for its class."""
        return self.arena_slabs.get(seq.kv_class, 0) if self.arena_slabs else self.num_slabs

    def max_slabs(self, seq: Sequence) -> int:
        """Slabs for all the KV that `seq` can ever have here, which is what it needs to run alone.

        A sequence that is handed over, or only scored, never grows beyond its present tokens.
        """
        slabs = num_chunks(self.expected_tokens(seq, 1.0))
        return slabs + self.extra_slabs.get(self.arena_name(seq), RING_AND_MAP) if seq.keep.evicts else slabs

    def expected_tokens(self, seq: Sequence, ratio: float) -> int:
        """Number of tokens that `seq` ends with if it generates the share `ratio` of its remaining `max_tokens`."""
        total = seq.total
        if seq.hold_kv:
            return total
        rest = seq.sampling.max_tokens - len(seq.output)
        if rest <= 0:
            return total
        return max(total, min(total + ceil(ratio * rest), self.max_model_len))
