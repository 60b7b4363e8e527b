"""What is scheduled: one attempt to continue one prompt, and how much of all that an engine takes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from diptych.errors import DiptychError
from diptych.request import Origin, Sampling
from kvcache.layout import CHUNK_TOKENS
from kvcache.prefix_tree import chunk_keys


def chunks(tokens: int) -> int:
    """Slabs that hold `tokens` tokens."""
    return -(-tokens // CHUNK_TOKENS)


class Refused(DiptychError):
    """The engine does not take a sequence. `code` is that of `diptych.messages.Failed`."""

    def __init__(self, code: str, what: str, why: str = "") -> None:
        super().__init__(what, why)
        self.code = code


@dataclass(slots=True)
class Sequence:
    """One attempt to continue one prompt, and how far it has come.

    `output` may come in non-empty: tokens that an earlier attempt delivered, which are part of what is read here.
    `hold` means that the sequence leaves after one token, with its slabs, for another engine to continue; `stage` that
    its KV is announced while it is computed (`engine.seams.Follower`). Tokens 0 to `computed` - 1 have KV, token i in
    slab `slabs[i // 64]`; `target` of them is where reading ends and writing begins.

    `root` is the address that its chunks hang from in the prefix tree, empty if they are never shared; `keys` are the
    addresses of its full chunks so far, of which the first `shared` are in the tree.
    """

    id: str
    epoch: int
    prompt: list[int]
    sampling: Sampling
    deadline_s: float  # on the clock that `now_s` is read from
    output: list[int] = field(default_factory=list)
    hold: bool = False
    stage: bool = False
    slabs: list[int] = field(default_factory=list)
    computed: int = 0
    origin: Origin = Origin()
    root: bytes = b""
    keys: list[bytes] = field(default_factory=list)
    shared: int = 0
    cached: int = 0  # tokens that were found in the prefix tree, not computed here
    parked: bool = False  # preempted, and its KV is in the host tier
    target: int = 0  # set by `add` and `adopt`, as are those below
    number: int = 0  # of its arrival: lower came sooner
    arrived_s: float = 0.0
    started_s: float | None = None
    key: str = field(init=False)  # its name here, and in `Holdings`

    def __post_init__(self) -> None:
        self.key = f"{self.id}#{self.epoch}"

    @property
    def total(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Tokens that are known and have no KV; 1 for a sequence that decodes."""
        return len(self.prompt) + len(self.output) - self.computed

    @property
    def unread(self) -> int:
        """Tokens that have to be run when it is in the queue, unless the prefix tree has some of them."""
        return self.pending if self.parked else self.total

    @property
    def decoding(self) -> bool:
        """Everything it came with has been read, and its first token here has been written."""
        return self.computed >= self.target < len(self.prompt) + len(self.output)

    @property
    def rank(self) -> tuple[int, int]:
        """Who deserves memory most comes first: priority, then arrival."""
        return self.origin.priority, self.number

    @property
    def scored(self) -> bool:
        """Its prompt tokens are to be scored, so each of them must be run here."""
        return self.sampling.prompt_logprobs is not None and not self.output

    def tokens(self, start: int, count: int) -> list[int]:
        """The token ids at positions `start` to `start + count - 1`, across prompt and output."""
        split, end = len(self.prompt), start + count
        return self.prompt[start:end] + self.output[max(0, start - split) : max(0, end - split)]

    def address(self) -> list[bytes]:
        """`keys`, extended to all full chunks of what is known by now."""
        if self.root and len(self.keys) < self.total // CHUNK_TOKENS:
            chunk_keys(self.prompt + self.output, self.root, self.keys)
        return self.keys

    def attachable(self) -> list[bytes]:
        """Addresses of the chunks that need not be computed if they are known; one token is left for its logits."""
        if self.scored and not self.parked:
            return []
        return self.keys[: self.computed // CHUNK_TOKENS if self.parked else (self.total - 1) // CHUNK_TOKENS]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one engine takes on. Lengths are in tokens.

    `saturation_tokens` (L_m) is what a step that only reads is filled to: the shortest that keeps the device busy
    (`engine.saturation`); 0 means the whole budget. `tpot_s` is how long a step may take while somebody decodes in it;
    None: as long as it takes.
    """

    num_slabs: int
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512  # per step, over all sequences
    chunked_prefill: bool = True  # False: prompts whole, one longer than the budget in a step of its own size
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    saturation_tokens: int = 0
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        # Every running sequence may decode; one token of budget each keeps a prefill beside them moving, too.
        if not 0 < self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must be positive and at most"
                f" max_num_batched_tokens ({self.max_num_batched_tokens})"
            )

    def room(self, seq: Sequence) -> int:
        """Slabs for all the KV that `seq` can ever have here: what it needs to run alone.

        A sequence that is handed over, or only scored, never grows beyond what it came with.
        """
        return chunks(self.grown(seq, 1.0))

    def grown(self, seq: Sequence, ratio: float) -> int:
        """Tokens that `seq` ends with if it writes the share `ratio` of what it still may."""
        total = seq.total
        if seq.hold:
            return total
        rest = seq.sampling.max_tokens - len(seq.output)
        if rest <= 0:
            return total
        return max(total, min(total + ceil(ratio * rest), self.max_model_len))
