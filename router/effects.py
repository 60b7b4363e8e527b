"""Events that the relay handles, and effects that it returns to the gateway: plain data on both sides.

The relay (`router.requests.relay`) is pure: the gateway passes it events and carries out the returned effects.
`FinishRequest`, `FailRequest` and `RequestCancelled` are terminal: every request that arrived gets exactly one of them,
and no effect after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.chunks import RAW_CLASS
from diptych.failure_statuses import RequestFailure
from diptych.messages import Drain, Output, SwitchRole, ToGateway, ToWorker
from diptych.request import Request, RequestStage

# ---- events


@dataclass(frozen=True, slots=True)
class ChosenPair:
    """The workers of one attempt; `prefill` is None if the decode worker also prefills."""

    prefill: str | None
    decode: str


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A validated request arrived. The caller may already have stamped stage ADMITTED with the time of its first byte.

    `pinned_pair` marks a canary request of the gateway itself: it uses exactly these workers, ignores limits, is not
    retried and not measured. `others` are the other sequences of the same HTTP request: all are admitted, or none.
    """

    request: Request
    pinned_pair: ChosenPair | None = None
    others: tuple[Request, ...] = ()

    @property
    def requests(self) -> tuple[Request, ...]:
        """All sequences of the HTTP request."""
        return self.request, *self.others


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    """A worker sent this message, which may be Hello, Heartbeat or Linked too."""

    worker: str
    message: ToGateway


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The gateway found that this life of a worker has ended, for example because sending to it failed."""

    worker: str
    incarnation: str
    reason: str = "it cannot be reached"


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client of this request has disconnected. `others` are the other sequences of the same HTTP request.

    All are cancelled before what they free is given to others, so that none of them begins only to be cancelled.
    """

    request: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StopFound:
    """The gateway found a stop string in the request's text: finish the request with reason "stop"."""

    request: str


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """An operator wants a worker to drain or to change its role. From now on no request begins there.

    Ignored if there is no such worker.
    """

    worker: str
    message: Drain | SwitchRole


@dataclass(frozen=True, slots=True)
class ClockTick:
    """Time has passed: deadlines, leases and heartbeats are checked. Expected every 50 to 250 ms."""


RelayEvent = RequestArrived | WorkerSaid | WorkerLost | ClientGone | StopFound | WorkerCommand | ClockTick

# ---- effects


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send `message` to the worker. If that fails, the caller must report `WorkerLost`."""

    worker: str
    message: ToWorker


@dataclass(frozen=True, slots=True)
class DeliverTokens:
    """New tokens for the client, in order across attempts. If `output.finish` is set, `FinishRequest` follows."""

    request: str
    output: Output


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """The answer is complete. `reason` is "stop" or "length"."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The request has failed: an HTTP error if no token was delivered yet, else an error event in the stream."""

    request: str
    failure: RequestFailure


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client disconnected; every worker that held something for the request was sent an abort."""

    request: str


@dataclass(frozen=True, slots=True)
class StageDurations:
    """How long each phase of a request took, for metrics.

    With the request's first token: "admission", "retry" (attempts that were given up), "restore" (only if a prefix was
    read back), "prefill_queue", "prefill" and "deliver", which sum to the time from its ADMITTED stamp to this token.
    With the first token of its decode worker: "decode_admission", "transfer" and "first_decode", which sum to the time
    since the prefill worker's token. If the decode worker draws the first token, all are reported with it, and sum to
    its time.
    """

    request: str
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class RequestQueued:
    """The request waits in the gateway, for credit or for workers; `AttemptBegan` or a terminal effect follows."""

    request: str


@dataclass(frozen=True, slots=True)
class AttemptBegan:
    """An attempt has begun, with KV of `kv_class`; `kv_reason` is why, in a word (`router.routing.class_choice`).

    With `staged`, its KV is announced and may be pulled while it is computed. `keep` is the threshold of eviction
    (`diptych.eviction_spec`); 1: everything is kept.
    """

    request: str
    epoch: int
    pair: ChosenPair
    staged: bool
    kv_class: str = RAW_CLASS
    kv_reason: str = "default"
    keep: float = 1.0


@dataclass(frozen=True, slots=True)
class StageEntered:
    """The request entered another stage. Terminal stages are reported by the terminal effects instead."""

    request: str
    stage: RequestStage


@dataclass(frozen=True, slots=True)
class KvMoved:
    """KV was transferred between two workers; `seconds` is the time of pulling and verifying.

    `hidden_s` is the part of pulling before the KV was complete; `exposed_s` the time from the ticket to the last byte.
    """

    request: str
    source: str
    target: str
    transport: str
    num_bytes: int
    seconds: float
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    kv_class: str = RAW_CLASS


@dataclass(frozen=True, slots=True)
class AttemptRetried:
    """An attempt was given up because of `code`, after `delivered` tokens; the next attempt has number `epoch`.

    `why` is a text for the operator.
    """

    request: str
    code: str
    epoch: int
    delivered: int = 0
    why: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class PrefilledLocally:
    """A decode worker prefills this prompt itself.

    `reason`: no prefill worker is up ("no_prefill_worker"), none can be linked ("no_link"), or the decode worker is
    predicted to be done earlier ("sooner").
    """

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class OverdraftSettled:
    """A request began before its decode room was free, and now its KV is complete.

    `in_time`: there is room by now; else the KV waits at its prefill worker.
    """

    request: str
    in_time: bool


@dataclass(frozen=True, slots=True)
class RequestQuarantined:
    """The request is considered the cause of worker crashes and refused; `FailRequest` follows."""

    request: str


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker has joined, in a new life or over a new link."""

    worker: str
    role: str
    incarnation: str
    # Link of its `Hello`: the gateway accepts the channel session that began with it.
    link: str = ""


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """The relay has dropped this life of a worker. End its channel session, so that it says Hello again if it lives."""

    worker: str
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerUnfit:
    """A worker cannot serve with the others; `text` explains it, with the differing fields side by side."""

    worker: str
    text: str


@dataclass(frozen=True, slots=True)
class RejectSession:
    """Tell the worker that began the session `link` that it must end, and why."""

    worker: str
    link: str
    why: str


FleetChange = SendMessage | WorkerUp | WorkerDown | WorkerUnfit | RejectSession
# Effects that concern metrics and logs only.
TelemetryEffect = (
    StageDurations
    | RequestQueued
    | AttemptBegan
    | StageEntered
    | KvMoved
    | AttemptRetried
    | PrefilledLocally
    | OverdraftSettled
    | RequestQuarantined
)
RelayEffect = FleetChange | DeliverTokens | FinishRequest | FailRequest | RequestCancelled | TelemetryEffect
