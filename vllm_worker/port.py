"""What a vLLM worker asks of vLLM, as plain data and a protocol; imports neither vLLM nor torch.

    VllmEngine (engine.py) ──add, abort, step──▶ EnginePort ──▶ vLLM's scheduler and runner
                                                     └─ connector.py ◀──▶ transfer buffer

Two ports exist: `vllm_worker.vllm_port` drives vLLM, and a toy one in the tests computes tokens from the bytes of its
KV blocks. A block of vLLM is a chunk of ours: `diptych.chunks.CHUNK_TOKENS` tokens in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from diptych.errors import DiptychError
from diptych.messages import Logprob
from diptych.request import SamplingParams

if TYPE_CHECKING:
    from kvtransfer.transfer_buffer import TransferBuffer


class PortRefused(DiptychError):
    """vLLM cannot take a request. `code` is a code of `diptych.messages.Failed`, `what` and `why` say the reason."""

    def __init__(self, code: str, what: str, why: str = "") -> None:
        super().__init__(what, why)
        self.code = code


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Verified KV in slabs of the transfer buffer: that of a request's first `num_tokens` tokens, 64 in each slab."""

    slabs: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PortRequest:
    """One attempt of a request, as vLLM gets it.

    `key` is "<request>#<epoch>". `output` are the tokens that were delivered already; `sampling` is that of the whole
    request, so its limits still count them. `salt` separates prefixes that must not be shared. A lower `priority` runs
    sooner; within a priority, the one that arrived first.

    `save`: it ends after one token, unless it stops there, and then its KV of all tokens but that one leaves for the
    transfer buffer. `defer_first`: with `save`, that token is thrown away, since another worker draws it.
    `load`: its KV is in the transfer buffer; the port computes what is missing, at least the last token.
    """

    key: str
    prompt: list[int]
    output: list[int]
    sampling: SamplingParams
    priority: int = 0
    salt: str = ""
    arrived_s: float = 0.0
    save: bool = False
    defer_first: bool = False
    load: LoadPlan | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are known when it begins."""
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True, slots=True)
class PortOutput:
    """What one step did for one request: new `tokens`, and how it ended.

    `finish` is None, "stop", "length" or "error" (`error` then says why). "saved" ends a request whose KV leaves for
    the buffer: `EnginePort.saved` names it later. `cached_tokens`, `prompt_logprobs` and `started_s`, the time on
    `time.monotonic` at which it left the queue, come with the first output only.
    """

    key: str
    tokens: list[int]
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    finish: str | None = None
    cached_tokens: int = 0
    started_s: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class SavedKv:
    """KV that a request left in the transfer buffer: that of `num_tokens` tokens, in `slabs`, owned by its key."""

    key: str
    slabs: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ComputedPart:
    """What a step computed of a request: `count` tokens from position `start` on."""

    key: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class PortCounts:
    """What the port has counted. Those of the second row only grow.

    `running` and `waiting` are requests in the scheduler, `loading` of the waiting ones those whose KV is being loaded;
    `used_blocks` are blocks with an owner, `cached_blocks` free ones with KV that may be used again.
    `prefix_queries` and `prefix_hits` are tokens; `step_tokens` are those that the last step computed, of which
    `prefill_tokens` belong to requests without any output yet.
    """

    running: int = 0
    waiting: int = 0
    loading: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    step_tokens: int = 0
    prefill_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class LayerPart:
    """The bytes that one rank's tensor of one layer has in a block."""

    name: str
    block_bytes: int


@dataclass(frozen=True, slots=True)
class PortFacts:
    """What vLLM made of the model and its options; it never changes.

    `parts` are those of one rank, in the order in which a slab has them; a slab of the transfer buffer has the parts of
    rank 0, then of rank 1, and so on. `seeds_by_position`: the noise of a seeded request depends on the seed and the
    token's position alone. `chunks_seeded`: seeded requests survive a prompt that is prefilled in several steps.
    """

    version: str
    attention_backend: str
    device: str
    dtype: str
    block_tokens: int
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    ranks: int = 1
    max_num_seqs: int = 1
    parts: tuple[LayerPart, ...] = ()
    seeds_by_position: bool = False
    chunks_seeded: bool = True
    # Further facts that must agree for KV to be exchanged: quantisation, dtype of the KV, shapes.
    identity: dict[str, str] = field(default_factory=dict)

    @property
    def slab_bytes(self) -> int:
        """Bytes of one block over all layers and ranks."""
        return self.ranks * sum(part.block_bytes for part in self.parts)


class EnginePort(Protocol):
    """vLLM as `vllm_worker.engine.VllmEngine` drives it. One thread calls everything."""

    facts: PortFacts

    def attach_buffer(self, buffer: TransferBuffer) -> None:
        """Let KV leave for `buffer` and be loaded from it, from now on. Without it nothing can be saved."""

    def add(self, request: PortRequest) -> None:
        """Queue a request. Raises PortRefused, after which nothing is held for it and its load plan is not used."""

    def abort(self, keys: list[str]) -> None:
        """End requests in any phase, without an output. Unknown keys are no error.

        What is being copied ends first: `saved`, `loaded` and `failed_loads` still name those keys.
        """

    def step(self) -> list[PortOutput]:
        """Run one step of the scheduler, and return what it did.

        Raises only what ends the worker: an error of one request is an output with `finish="error"`.
        """

    @property
    def has_work(self) -> bool:
        """Whether the scheduler holds anything at all: requests, or blocks that are still being copied."""

    @property
    def is_waiting_only(self) -> bool:
        """Whether all that it holds waits, such as for copies, so that the caller should rest before the next step."""

    def saved(self) -> list[SavedKv]:
        """The KV that has arrived in the buffer since the last call; vLLM has freed its blocks or is about to.

        A request that was aborted meanwhile is named as well: its slabs are the caller's in any case.
        """

    def loaded(self) -> list[str]:
        """The keys whose load plans have ended since the last call: nothing reads their slabs any more."""

    def failed_loads(self) -> list[str]:
        """The keys whose load has failed since the last call, also named by `loaded`. They, and requests that shared
        their blocks, end with `finish="error"` in the same step; no prefix that was known before is any more.
        """

    @property
    def held_blocks(self) -> int:
        """Blocks with an owner; 0 at rest."""

    @property
    def counts(self) -> PortCounts:
        """The counts of now."""

    def computed(self) -> list[ComputedPart]:
        """What the last step computed, also of requests that have ended in it."""

    def clear_prefixes(self) -> None:
        """Forget all cached prefixes, while nothing is held."""

    def close(self) -> None:
        """End the engine and its ranks. Idempotent."""
