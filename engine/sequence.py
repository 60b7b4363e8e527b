"""The sequence, the engine's unit of scheduling: one attempt to continue one prompt. Also the limits of an engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import DiptychError
from diptych.keep_spec import KEEP_ALL, KeepSpec
from diptych.request import SamplingParams, Tenancy
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
    `hold_kv`: the sequence leaves the engine after one token, with its slabs, and another engine continues it. `stage`:
    its KV is announced while it is computed (`engine.protocols.KvObserver`). Tokens 0 to `computed` - 1 have KV, token
    i in slab `slabs[i // 64]`; prefill ends at `target` tokens, and then decode begins.

    `kv_class` names the arena that its KV is in (`kvcache.arenas`); it never changes.
    `root` is the address before its first chunk in the prefix tree, empty if its chunks are never shared; `keys` are
    the addresses of its full chunks so far, of which the first `shared` are in the tree.
    """

    id: str
    epoch: int
    prompt: list[int]
    sampling: SamplingParams
    # Latest time at which it may end, in seconds on the clock of `now_s`.
    deadline_s: float
    output: list[int] = field(default_factory=list)
    hold_kv: bool = False
    stage: bool = False
    slabs: list[int] = field(default_factory=list)
    computed: int = 0
    origin: Tenancy = Tenancy()
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
    # Its number in order of arrival: a lower number came earlier.
    number: int = 0
    arrived_s: float = 0.0
    started_s: float | None = None
    # Whether its KV came from another worker; set when it starts.
    fetched: bool = False
    # Whether nothing has been emitted for it yet.
    silent: bool = True
    kv_class: str = ""
    # What it may drop of its KV.
    keep: KeepSpec = KEEP_ALL
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
        return len(self.prompt) + written == self.computed and written < self.sampling.max_tokens

    @property
    def precedence(self) -> tuple[int, int]:
        """Sort key for memory: sequences with a lower key keep it longer. Priority, then arrival."""
        return self.origin.priority, self.number

    @property
    def ready(self) -> bool:
        """Whether it can start; False while its grammar is being compiled."""
        return self.matcher is None or bool(self.matcher.ready)

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt tokens have to be scored, so that each of them must be computed here."""
        return self.sampling.prompt_logprobs is not None and not self.output

    def tokens(self, start: int, count: int) -> list[int]:
        """The token ids at positions `start` to `start + count - 1`, across prompt and output."""
        split, end = len(self.prompt), start + count
        return self.prompt[start:end] + self.output[max(0, start - split) : max(0, end - split)]

    def update_keys(self) -> list[bytes]:
        """Extend `keys` to all full chunks of the tokens known by now, and return them."""
        if self.root and len(self.keys) < self.total // CHUNK_TOKENS:
            chunk_keys(self.prompt + self.output, self.root, self.keys)
        return self.keys

    def attachable_keys(self) -> list[bytes]:
        """Addresses of the chunks that need not be computed if they are cached; the last token always is, for its
        logits.
        """
        if self.scores_prompt and not self.parked:
            return []
        return self.keys[: self.computed // CHUNK_TOKENS if self.parked else (self.total - 1) // CHUNK_TOKENS]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of one engine. Lengths are in tokens.

    `arena_slabs` are the slabs of each KV class of a worker with several; `num_slabs` is their sum. It is empty for a
    worker with one class: its sequences all share one arena, whatever their class is called.

    `saturation_tokens` (L_m) is the size of a step that only prefills: the smallest that keeps the device busy
    (`engine.saturation`); 0 means the whole budget. `tpot_s` is how many seconds a step may take while any sequence
    decodes in it; None: no limit.
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
    arena_slabs: Mapping[str, int] = field(default_factory=dict)

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
        return num_chunks(self.expected_tokens(seq, 1.0))

    def expected_tokens(self, seq: Sequence, ratio: float) -> int:
        """Number of tokens that `seq` ends with if it generates the share `ratio` of its remaining `max_tokens`."""
        total = seq.total
        if seq.hold_kv:
            return total
        rest = seq.sampling.max_tokens - len(seq.output)
        if rest <= 0:
            return total
        return max(total, min(total + ceil(ratio * rest), self.max_model_len))
