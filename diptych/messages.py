"""The messages between the gateway and the workers.

Every message is a tagged msgspec struct in one of two closed unions, `ToWorker` and `ToGateway`. Durations are sent as
remaining seconds, never as clock readings. `epoch` is the number of the attempt (`diptych.request.Request`), used for
fencing: a receiver that knows a newer epoch of the same request drops the message and counts it. `ticket` and
`endpoint` are opaque here; `kvtransfer` defines their content.

    gateway ── Alive, Welcome, Reject, Peer, Unpeer, OpenTransport, Prefill, Generate, Admit, Staging, Fetch, Renew,
               Release, Abort, Drain, SwitchRole ──▶ worker
    worker  ── Hello, Heartbeat, Linked, Opened, Step, Staged, Offer, Pulled, Failed ──▶ gateway
"""

from __future__ import annotations

import msgspec

from diptych.eviction_report import KeptReport
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.request import CONTINUED, SamplingParams, Tenancy
from diptych.stats.counters import WORKER_COUNTERS
from diptych.stats.tiers import TierStats

# A peer that was silent for this long counts as lost; no pause of a healthy process lasts that long.
SILENCE_S = 10.0


class ChannelMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages: immutable, tagged by class name, encoded as msgpack arrays."""


# ---- gateway to worker


class Alive(ChannelMessage, frozen=True):
    """The gateway's heartbeat: the answer to every `Hello` and `Heartbeat`, from the gateway's I/O thread."""


class Welcome(ChannelMessage, frozen=True):
    """The gateway has accepted this worker; it also sets the intervals that the worker must keep.

    A worker that receives it aborts everything it holds, which belongs to requests that the gateway has given up. The
    worker sends a heartbeat every `beat_s`; leases last `lease_s`; a side that is silent for `silence_s` counts as
    lost.
    """

    gateway: str
    beat_s: float
    lease_s: float
    silence_s: float = SILENCE_S


class Reject(ChannelMessage, frozen=True):
    """The gateway rejects this worker, which must end. `why` is for its operator."""

    why: str


class Peer(ChannelMessage, frozen=True):
    """A prefill worker that a decode worker may pull from; the decode worker links, measures and answers `Linked`."""

    worker: str
    incarnation: str
    # Transport name -> endpoint (see `kvtransfer.cooperative.CoopPuller.link_task`).
    endpoints: dict[str, bytes]


class Unpeer(ChannelMessage, frozen=True):
    """This life of a prefill worker is over; the decode worker drops its link to it."""

    worker: str
    incarnation: str


class Prefill(ChannelMessage, frozen=True):
    """Prefill the prompt (and `output`, tokens of earlier attempts), emit one token, and offer the KV.

    `stage`: announce KV while it is computed (`Staged`). `defer_first`: the decode worker draws the first token, so no
    `Output` before the offer has one. `keep`: what may be dropped; with `cuts_kept` the rest is offered in segments.
    """

    request: str
    epoch: int
    prompt: list[int]
    output: list[int]
    sampling: SamplingParams
    remaining_s: float
    tenancy: Tenancy = Tenancy()
    stage: bool = False
    # The KV class (`Hello.kv_classes`) that this attempt's KV is in; empty: the worker's first one.
    kv_class: str = ""
    keep: KeepSpec = KEEP_ALL
    defer_first: bool = False
    cuts_kept: bool = False


class Generate(ChannelMessage, frozen=True):
    """Prefill and decode on this worker, with no hand-off (colocated, or local prefill).

    A prompt that is pooled comes this way to a prefill worker, too.
    """

    request: str
    epoch: int
    prompt: list[int]
    output: list[int]
    sampling: SamplingParams
    remaining_s: float
    tenancy: Tenancy = Tenancy()
    # As in `Prefill`.
    kv_class: str = ""
    keep: KeepSpec = KEEP_ALL


class Admit(ChannelMessage, frozen=True):
    """Reserve slabs, pull the KV that `ticket` offers, verify it, and decode.

    `output` has the tokens that were delivered already; the last of them has no KV yet and is the first decode input.
    Without any, it was deferred: the prompt's last token is computed again, and the first one drawn.

    With an empty `ticket` the KV is still being computed: slabs are reserved, chunks that `Staging` announces may be
    pulled ahead, and `Fetch` brings the ticket and the first token, which `output` then lacks.
    """

    request: str
    epoch: int
    prompt: list[int]
    output: list[int]
    sampling: SamplingParams
    ticket: bytes
    remaining_s: float
    tenancy: Tenancy = Tenancy()
    # As in `Prefill`.
    kv_class: str = ""
    keep: KeepSpec = KEEP_ALL


class Staging(ChannelMessage, frozen=True):
    """A hint for an attempt that was admitted without a ticket: these chunks are being computed (see `Staged`)."""

    request: str
    epoch: int
    hint: bytes


class Fetch(ChannelMessage, frozen=True):
    """The ticket of an attempt that was admitted without one; `output` has the first token now. All else stays."""

    request: str
    epoch: int
    output: list[int]
    ticket: bytes
    remaining_s: float


class Renew(ChannelMessage, frozen=True):
    """Keep these leases (request, epoch) for another `lease_s`."""

    leases: list[tuple[str, int]]


class Release(ChannelMessage, frozen=True):
    """The KV of (request, epoch) was pulled or is not needed: the prefill worker may free it. Idempotent."""

    request: str
    epoch: int


class Abort(ChannelMessage, frozen=True):
    """Stop working on the request and free all it holds, in any phase, for this epoch and older ones. Idempotent."""

    request: str
    epoch: int


class OpenTransport(ChannelMessage, frozen=True):
    """Offer KV over this transport too, since a decode worker cannot use the open ones. The answer is `Opened`."""

    transport: str


class Drain(ChannelMessage, frozen=True):
    """Take no new work, and exit when nothing is held any more."""


class SwitchRole(ChannelMessage, frozen=True):
    """Join the other pool: drain as for `Drain`, then say Hello again as `role`, "prefill" or "decode"."""

    role: str


# ---- worker to gateway


class Hello(ChannelMessage, frozen=True):
    """A worker's introduction, sent at its start and at the beginning of every session."""

    worker: str
    # The worker's role: "prefill" or "decode".
    role: str
    # Identifies one life of the worker. It is new at every start and every change of role.
    incarnation: str
    fingerprint: str
    # The readable fields behind the fingerprint; errors about a mismatch show them.
    identity: dict[str, str]
    host: str
    pid: int
    num_slabs: int
    chunk_bytes: int
    max_model_len: int
    # The endpoint of each transport; empty for a transport that is opened on demand.
    endpoints: dict[str, bytes]
    # Identifies the channel session; new for every session, set by `diptych.channel.link.ChannelLink`.
    link: str = ""
    # How the process before this one ended: "crashed", "killed" (from outside), or "" if there was none.
    ended: str = ""
    # The KV classes that this worker has room for: the codec's canonical id ("raw" without a codec) -> number of slabs,
    # and bytes of a chunk. KV is exchanged between workers that have the same class. The first one is that of requests
    # which ask for none.
    kv_classes: dict[str, tuple[int, int]] = {}
    # Bytes that a chunk of this model takes in the class "raw"; 0 if the worker does not say.
    raw_chunk_bytes: int = 0
    # By how many percent perplexity grows with each class, as the calibration recorded it; others are left out.
    kv_losses: dict[str, float] = {}
    # Whether the gateway chooses the class of requests that ask for none, and not the first one.
    kv_auto: bool = False
    # The KV classes in which this worker can evict (`diptych.eviction_spec`); other classes keep everything.
    keep_classes: list[str] = []
    # Where the worker's log lies on its host; empty if it does not say.
    log_file: str = ""
    # Of a worker that computes blocks of bulk work: sequences of its block, and prompt tokens that it takes at once.
    # Of a worker on a GPU, whose steps are large: prompt tokens that may wait there.
    block_sequences: int = 0
    block_tokens: int = 0
    # The policy by which it computes them, as text; and what it continues exactly where another worker stopped, or
    # knows of requests at all (`diptych.request.TRAITS`). Workers that do not say so continue everything.
    block_policy: str = ""
    traits: tuple[str, ...] = CONTINUED
    # Whether it can pool prompts (`diptych.request.Pooling`).
    pools: bool = False
    # The time slice with which it computes prompts, so that threads that wake interrupt them; 0: the kernel's own.
    prefill_slice_ms: float = 0.0
    # The rules by which it can evict (`diptych.eviction_spec.KeepSpec.rule`). Workers that do not say so know of none.
    keep_rules: tuple[str, ...] = ()


# Upper bounds of the sizes of steps that workers count, in tokens; vLLM's for `vllm:iteration_tokens_total`.
STEP_SIZE_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class WorkerStats(msgspec.Struct, frozen=True, array_like=True):
    """A worker's statistics. At rest every `*_used`, `leases` and `staging_bytes` is 0; `*_cached` need not be."""

    slabs_total: int = 0
    slabs_used: int = 0
    leases: int = 0
    staging_bytes: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    late_messages: int = 0
    integrity_failures: int = 0
    leases_expired: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    step_tokens: int = 0
    # Slabs in the prefix tree without a holder; they can be evicted at any time.
    slabs_cached: int = 0
    # Number of prompt tokens looked up in the prefix tree, and of those found there.
    prefix_queries: int = 0
    prefix_hits: int = 0
    # Number of preemptions by kind: "recompute" drops the KV, "park" keeps it in host memory.
    preemptions: dict[str, int] = {}
    # Seconds of `step_seconds` by part: schedule, prepare, run, sample, send.
    step_parts: dict[str, float] = {}
    # Whether the worker takes no new requests.
    draining: bool = False
    # Seconds since the engine's loop began its current round, if the round takes unusually long; else 0.
    stuck_s: float = 0.0
    # Bytes of KV that were pulled before the ticket and did not match its digests.
    wasted_bytes: int = 0
    # Number of times that a running sequence gave its seat to another one and kept its KV.
    seat_pauses: int = 0
    # Number of steps by the tokens that they computed: one count for each of `STEP_SIZE_BOUNDS`, one for larger.
    step_sizes: list[int] = []
    # Of `waiting`, the sequences whose KV has not arrived: it is still being prefilled, or on its way.
    deferred: int = 0
    # `slabs_used` and `slabs_cached` by KV class; empty if the worker has one class.
    class_slabs_used: dict[str, int] = {}
    class_slabs_cached: dict[str, int] = {}
    # Slabs that only bulk work holds; they are not part of `slabs_used`, since others take them back at once.
    slabs_lent: int = 0
    # Sequences of bulk work that hold memory, and that wait; the other fields leave bulk work out.
    bulk_running: int = 0
    bulk_waiting: int = 0
    # Units of bulk work, the seconds that they took, the tokens that they computed; and how often it lost its memory.
    bulk_units: int = 0
    bulk_seconds: float = 0.0
    bulk_tokens: int = 0
    bulk_preemptions: int = 0
    # Slabs of a device's transfer buffer: all, those in use, of these under lease, and with chunks that nobody uses.
    buffer_slabs: int = 0
    buffer_used: int = 0
    buffer_leased: int = 0
    buffer_cached: int = 0
    # Slabs that are being copied between the buffer and the device.
    copies_in_flight: int = 0
    # Sequences whose prefill is complete, and whose KV waits for room in the buffer or is being copied there.
    offers_waiting: int = 0
    # Prompt tokens looked up in the tiers below the pool, those read back, and the tiers, the fastest first.
    tier_queries: int = 0
    tier_hits: int = 0
    tiers: dict[str, TierStats] = {}
    # Slabs of segments of adopted sequences: "found" or "pulled"; and, with tiers, the measured speed of prefills.
    segment_slabs: dict[str, int] = {}
    prefill_tokens_per_s: float = 0.0

    def since(self, then: WorkerStats) -> WorkerStats:
        """These, with the counters counted from `then` on: one engine serves several roles, each with its own."""
        if not (then.steps or then.prefix_queries or then.bulk_units):
            return self
        counts = {name: getattr(self, name) - getattr(then, name) for name in WORKER_COUNTERS}
        return msgspec.structs.replace(
            self,
            preemptions={kind: n - then.preemptions.get(kind, 0) for kind, n in self.preemptions.items()},
            step_parts={part: s - then.step_parts.get(part, 0.0) for part, s in self.step_parts.items()},
            tiers={name: one.since(then.tiers.get(name, TierStats())) for name, one in self.tiers.items()},
            **counts,
        )


class Heartbeat(ChannelMessage, frozen=True):
    """Proof that the worker is alive, sent by its I/O thread, with its latest statistics."""

    worker: str
    incarnation: str
    stats: WorkerStats


class Linked(ChannelMessage, frozen=True):
    """A decode worker's measured link to a prefill worker, or why there is none (`transport` is then empty)."""

    peer: str
    incarnation: str
    transport: str
    gb_per_s: float
    latency_us: float
    error: str = ""
    # A transport that would work, but that the prefill worker has not opened yet.
    wants: str = ""


class Opened(ChannelMessage, frozen=True):
    """The endpoint of a transport that a prefill worker has just opened, or why it could not (`error`)."""

    transport: str
    endpoint: bytes
    error: str = ""


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of a token and of the likeliest ones, best first. `rank`: so many are as likely (0: unknown)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0


class Output(msgspec.Struct, frozen=True, array_like=True):
    """The result of one step for one request. `finish` is None, "stop" or "length".

    With `finish` the worker has freed everything of the request, except that a prefill worker still holds KV that it
    will offer. `seconds` maps stage names to durations.
    """

    request: str
    epoch: int
    tokens: list[int]
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    finish: str | None = None
    seconds: dict[str, float] = {}
    cached_tokens: int = 0
    # What is kept of its KV, if decided since its last output.
    kept: KeptReport | None = None
    # What was pooled, as float32 numbers: a vector, or one score.
    pooled: bytes = b""


class Step(ChannelMessage, frozen=True):
    """The outputs of one engine step, for all requests that progressed in it."""

    outputs: list[Output]


class Staged(ChannelMessage, frozen=True):
    """Chunks of (request, epoch) are being computed into the slabs in `hint` (`kvtransfer.ticket.StagingHint`).

    This is only a hint, which may be ignored or left out: the ticket that follows is authoritative.
    """

    request: str
    epoch: int
    hint: bytes


class Offer(ChannelMessage, frozen=True):
    """The KV of (request, epoch) is complete and leased; `ticket` contains what is needed to pull it.

    `num_slabs` hold it, 0 if it is not said; of an attempt that may drop tokens fewer than its `num_tokens` would need.
    """

    request: str
    epoch: int
    ticket: bytes
    num_tokens: int
    num_bytes: int
    num_slabs: int = 0


class Pulled(ChannelMessage, frozen=True):
    """The KV has arrived and is verified; decoding begins. The gateway then releases the KV at its source."""

    request: str
    epoch: int
    transport: str
    num_bytes: int
    # Seconds by phase: "reserve", "transfer" and "verify"; and of the transfer, "hidden" before the ticket came and
    # "exposed" after it.
    seconds: dict[str, float]


class Failed(ChannelMessage, frozen=True):
    """This attempt has failed on this worker, which has freed everything it held for it.

    `code`: "transfer_failed", "kv_corrupt", "stale_ticket", "deadline_exceeded", "out_of_memory", "overloaded",
    "invalid_grammar", "no_token_left", "unsupported_parameter", "draining", "internal_error".
    """

    request: str
    epoch: int
    code: str
    message: str


ToWorker = (
    Alive | Welcome | Reject | OpenTransport | Peer | Unpeer | Prefill | Generate | Admit | Staging
    | Fetch | Renew | Release | Abort | Drain | SwitchRole
)  # fmt: skip
ToGateway = Hello | Heartbeat | Linked | Opened | Step | Staged | Offer | Pulled | Failed
