"""What happens to the relay, and what it wants done: plain data on both sides.

`Finish`, `Fail` and `Cancelled` are terminal: every request that arrived gets exactly one of them, and nothing after.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.messages import Drain, Output, ToGateway, ToWorker, Turn
from diptych.request import Request, Stage

# ---- events


@dataclass(frozen=True, slots=True)
class Choice:
    """The workers of one attempt; `prefill` is None where one worker does both."""

    prefill: str | None
    decode: str


@dataclass(frozen=True, slots=True)
class Arrive:
    """A validated request; `stage` ADMITTED may be stamped with the moment its first byte came in.

    `pin` makes it internal (a canary): it goes through exactly these workers, past the limits, once, unmeasured.
    """

    request: Request
    pin: Choice | None = None


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A worker said this; Hello, Beat and Linked included."""

    worker: str
    message: ToGateway


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The gateway knows that this life of a worker is over, e.g. a send to it has failed."""

    worker: str
    incarnation: str
    reason: str = "it cannot be reached"


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody reads this request's answer any more."""

    request: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The gateway found the answer's end in its text (a stop string): end the request well, as "stop"."""

    request: str


@dataclass(frozen=True, slots=True)
class Command:
    """An operator wants a worker to end, or to change pools: no request begins there from now on.

    Nothing happens if it is not there.
    """

    worker: str
    message: Drain | Turn


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Wanted every 50 to 250 ms; deadlines, leases and heartbeats are looked at."""


Event = Arrive | FromWorker | WorkerLost | ClientGone | Stop | Command | Tick

# ---- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message`; if that fails, the relay wants to hear `WorkerLost`."""

    worker: str
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tokens for the client, in order, of any attempt. `output.finish` is told by `Finish`, which follows."""

    request: str
    output: Output


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete. `reason` is "stop" or "length"."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The request has failed; an HTTP error if nothing was delivered yet, else an event within the stream.

    `retry` says whether the client may send it again, `retry_after_s` when.
    """

    request: str
    status: int
    code: str
    message: str
    retry: bool = False
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client left; everything it held has been told to go."""

    request: str


@dataclass(frozen=True, slots=True)
class Durations:
    """Where the time of a request went, as metrics.

    With its first token: "admission", "retry" (an attempt given up), "prefill_queue", "prefill", "deliver"; they sum
    to the time from its ADMITTED stamp to that token. With the first from its decode worker: "decode_admission",
    "transfer", "first_decode", which sum to the time since the token of its prefill worker.
    """

    request: str
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits in the gateway, for room or for workers; `Began` or a terminal effect follows."""

    request: str


@dataclass(frozen=True, slots=True)
class Began:
    """An attempt has begun. `staged`: its KV is announced while it is computed."""

    request: str
    epoch: int
    choice: Choice
    staged: bool


@dataclass(frozen=True, slots=True)
class Entered:
    """The request is in another stage now. Terminal stages are told by the terminal effects."""

    request: str
    stage: Stage


@dataclass(frozen=True, slots=True)
class Moved:
    """KV went from one worker to another, in `seconds` of pulling and verifying.

    `hidden_s` of pulling were before the KV was complete; `exposed_s` went by between its ticket and its last byte.
    """

    request: str
    source: str
    target: str
    transport: str
    num_bytes: int
    seconds: float
    hidden_s: float = 0.0
    exposed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Retried:
    """An attempt was given up for `code`, after so many tokens `delivered`; the next one will have number `epoch`."""

    request: str
    code: str
    epoch: int
    delivered: int = 0


@dataclass(frozen=True, slots=True)
class Local:
    """A decode worker reads this prompt itself, since no prefill worker can.

    `reason`: "no_prefill_worker" is up, or "no_link" can be made.
    """

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The request is taken for the cause of crashes, and refused; `Fail` follows."""

    request: str


@dataclass(frozen=True, slots=True)
class Up:
    """A worker has come, in a new life or over a new link."""

    worker: str
    role: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Down:
    """That life of a worker is over for us.

    End its channel session, so that a survivor introduces itself anew; not if an `Up` of the same worker follows, since
    the session is then already that of its new life.
    """

    worker: str
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unfit:
    """A worker cannot serve with the others; `text` says why, with the differing fields side by side."""

    worker: str
    text: str


FleetChange = Send | Up | Down | Unfit
Telling = (
    Durations | Queued | Began | Entered | Moved | Retried | Local | Quarantined
)  # for books and logs only
Effect = FleetChange | Deliver | Finish | Fail | Cancelled | Telling
