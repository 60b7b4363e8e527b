"""What the gateway and the workers say to each other, and nothing else.

Every message is a tagged msgspec struct in one of two closed unions, `ToWorker` and `ToGateway`. Durations travel
as seconds that remain, never as clock readings. `epoch` is the fencing number of `diptych.request.Request`: a
receiver that knows a newer epoch of the same request drops the message and counts it. `ticket` and `endpoint` are
opaque here; their content belongs to `kvtransfer`.

    gateway ── Welcome, Peer, Prefill, Generate, Admit, Staging, Fetch, Renew, Release, Abort, Drain, Turn ──▶ worker
    worker  ── Hello, Beat, Linked, Step, Staged, Offer, Pulled, Failed ──▶ gateway
"""

from __future__ import annotations

import msgspec

from diptych.request import Origin, Sampling


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages: immutable, tagged by class name, encoded as msgpack arrays."""


# ---- gateway to worker


class Welcome(Message, frozen=True):
    """Answer to `Hello` (and, within the channel, to every `Beat`): the gateway's identity and the pace it expects.

    A worker that receives one aborts whatever it holds: it belongs to requests that the gateway has given up.
    """

    gateway: str
    beat_s: float
    lease_s: float


class Peer(Message, frozen=True):
    """A prefill worker that a decode worker may pull from; the decode worker links, measures and answers `Linked`."""

    worker: str
    incarnation: str
    endpoints: dict[str, bytes]  # transport name -> what its `link` needs


class Unpeer(Message, frozen=True):
    """That prefill worker's life is over; drop the link."""

    worker: str
    incarnation: str


class Prefill(Message, frozen=True):
    """Read the prompt (and `output`, when an earlier attempt already produced tokens), emit one token, offer the KV.

    `stage`: announce KV while it is computed (`Staged`), so that it can be pulled layer by layer meanwhile.
    """

    request: str
    epoch: int
    prompt: list[int]
    output: list[int]
    sampling: Sampling
    remaining_s: float
    origin: Origin = Origin()
    stage: bool = False


class Generate(Message, frozen=True):
    """Prefill and decode on this worker, with no hand-off (colocated, or local prefill)."""

    request: str
    epoch: int
    prompt: list[int]
    output: list[int]
    sampling: Sampling
    remaining_s: float
    origin: Origin = Origin()


class Admit(Message, frozen=True):
    """Reserve room, pull the KV that `ticket` names, verify it, and decode from there.

    `output` holds the tokens already delivered; the last of them has no KV yet and is the first decode input.

    An empty `ticket` says that the KV is still being computed: room is reserved, what `Staging` announces may be pulled
    ahead, and `Fetch` brings ticket and first token. `output` then lacks that token.
    """

    request: str
    epoch: int
    prompt: list[int]
    output: list[int]
    sampling: Sampling
    ticket: bytes
    remaining_s: float
    origin: Origin = Origin()


class Staging(Message, frozen=True):
    """A hint for an attempt that was admitted without a ticket: these chunks are being computed (see `Staged`)."""

    request: str
    epoch: int
    hint: bytes


class Fetch(Message, frozen=True):
    """The ticket of an attempt that was admitted without one; `output` now has the first token, too."""

    request: str
    epoch: int
    output: list[int]
    ticket: bytes
    remaining_s: float


class Renew(Message, frozen=True):
    """Keep these leases (request, epoch) for another `lease_s`."""

    leases: list[tuple[str, int]]


class Release(Message, frozen=True):
    """The prefill worker may free the KV it holds for (request, epoch). Idempotent."""

    request: str
    epoch: int


class Abort(Message, frozen=True):
    """Stop working on the request in any phase and free all it holds, for this epoch and older ones. Idempotent."""

    request: str
    epoch: int


class Drain(Message, frozen=True):
    """Take no new work; exit when everything held is gone."""


class Turn(Message, frozen=True):
    """Change to the other pool: drain as for `Drain`, then introduce yourself anew as `role`, with the same weights."""

    role: str  # "prefill" or "decode"


# ---- worker to gateway


class Hello(Message, frozen=True):
    """A worker's introduction, sent on start and whenever the link begins anew."""

    worker: str
    role: str  # "prefill" or "decode"
    incarnation: str  # new at every start of the process
    fingerprint: str
    identity: dict[str, str]  # the readable fields behind the fingerprint, shown side by side on a mismatch
    host: str
    pid: int
    num_slabs: int
    chunk_bytes: int
    max_model_len: int
    endpoints: dict[str, bytes]
    link: str = ""  # new for every unbroken run of frames; filled in by `diptych.channel.Link`
    ended: str = (
        ""  # how the process before this one ended: "crashed", "killed" (from outside), "" if there was none
    )


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """A worker's books. At rest every `*_used`, `leases` and `staging_bytes` is 0; `slabs_cached` need not be."""

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
    slabs_cached: int = 0  # in the prefix tree, held by nobody: free for the asking
    prefix_queries: int = 0  # prompt tokens looked up in the prefix tree
    prefix_hits: int = 0  # of them found
    preemptions: dict[str, int] = {}  # by way: "recompute", "park"
    step_parts: dict[
        str, float
    ] = {}  # seconds of `step_seconds` by part: schedule, prepare, run, sample, send
    draining: bool = False  # takes no new work
    stuck_s: float = 0.0  # since the engine's thread last came round, if that is unusually long
    wasted_bytes: int = 0  # of KV, pulled ahead of the ticket and changed by its source afterwards


class Beat(Message, frozen=True):
    """Proof of life, from the worker's I/O thread, with its latest books."""

    worker: str
    incarnation: str
    stats: Stats


class Linked(Message, frozen=True):
    """A decode worker's measured link to a prefill worker, or why there is none (`transport` is then empty)."""

    peer: str
    incarnation: str
    transport: str
    gb_per_s: float
    latency_us: float
    error: str = ""


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one emitted (or prompt) token and of the most likely alternatives, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Output(msgspec.Struct, frozen=True, array_like=True):
    """What one step produced for one request. `finish` is None, "stop" or "length"; then everything it held is free,

    except that a prefill worker which will offer the KV still holds that. `seconds` maps stage names to durations.
    """

    request: str
    epoch: int
    tokens: list[int]
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    finish: str | None = None
    seconds: dict[str, float] = {}
    cached_tokens: int = 0


class Step(Message, frozen=True):
    """One message per engine step, for all requests that progressed in it."""

    outputs: list[Output]


class Staged(Message, frozen=True):
    """Chunks of (request, epoch) are being computed into slabs that `hint` names (`kvtransfer.ticket.Hint`).

    Only a hint: what counts is the ticket that follows. A receiver may ignore it, and a sender may leave it out.
    """

    request: str
    epoch: int
    hint: bytes


class Offer(Message, frozen=True):
    """The KV of (request, epoch) is complete and leased; `ticket` says how to fetch it."""

    request: str
    epoch: int
    ticket: bytes
    num_tokens: int
    num_bytes: int


class Pulled(Message, frozen=True):
    """The KV arrived and was verified; decoding begins. The gateway then releases the source."""

    request: str
    epoch: int
    transport: str
    num_bytes: int
    seconds: dict[
        str, float
    ]  # "reserve", "transfer", "verify"; "hidden" and "exposed": pulled before, after the ticket


class Failed(Message, frozen=True):
    """This attempt is over on this worker, which has freed everything it held for it.

    `code`: "transfer_failed", "kv_corrupt", "stale_ticket", "deadline_exceeded", "out_of_memory", "overloaded",
    "invalid_grammar", "draining", "internal_error".
    """

    request: str
    epoch: int
    code: str
    message: str


ToWorker = (
    Welcome
    | Peer
    | Unpeer
    | Prefill
    | Generate
    | Admit
    | Staging
    | Fetch
    | Renew
    | Release
    | Abort
    | Drain
    | Turn
)
ToGateway = Hello | Beat | Linked | Step | Staged | Offer | Pulled | Failed
