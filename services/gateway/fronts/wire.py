"""What a front and the relay's process say to each other, as MessagePack over a Unix socket.

    front ── Joined, AskAdmission, Submit, SequenceStopped, ClientsGone, SequenceArrived, SequenceEnded … ─▶ relay
    relay ── RelayState, AdmissionAnswer, Delivered, Progressed, ClassChosen, Finished, SequenceFailed … ─▶ front

A frame is its length and a list of messages, which are handled in order. Times are seconds on the monotonic clock,
which all processes of a machine share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from diptych.chunks import RAW_CLASS
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.failure_statuses import RequestFailure
from diptych.messages import Output
from diptych.request import TOKEN_BYTES, Request, RequestStage, SamplingParams, Tenancy, token_bytes
from router.effects import TelemetryEffect
from router.workers.kv_classes import ServedClasses
from services.gateway.openai.schemas.response_schema import KvDetails
from services.gateway.outcomes import Ending, SequenceRecord

EFFECTS = {one.__name__: one for one in get_args(TelemetryEffect)}


class FrontMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Either process sends it to the other."""


# ---- from a front


class Joined(FrontMessage, frozen=True):
    """The first message of a front."""

    name: str


class AskAdmission(FrontMessage, frozen=True):
    """Whether a request of `tenant` would be refused now. `rated`: it counts for the rates of its key."""

    number: int
    tenant: str
    rated: bool


class AskRates(FrontMessage, frozen=True):
    """The headers that say what is left of the rates of a key."""

    number: int
    tenant: str


class SubmittedSequence(msgspec.Struct, frozen=True, array_like=True):
    """One sequence of a request; `prompt` is the place of its prompt among those of the request."""

    name: str
    prompt: int
    sampling: SamplingParams
    kv_class: str | None
    default_class: bool
    keep: KeepSpec = KEEP_ALL
    chunks: tuple[bytes, ...] | None = None


class Submit(FrontMessage, frozen=True):
    """The sequences of one HTTP request. Prompts are C unsigned ints; each is there once."""

    prompts: list[bytes]
    sequences: list[SubmittedSequence]
    tenancy: Tenancy
    arrived_s: float
    deadline_s: float


class ClientsGone(FrontMessage, frozen=True):
    """The client of these sequences, which are of one HTTP request, has left."""

    requests: list[str]


class SequenceStopped(FrontMessage, frozen=True):
    """The text of a sequence has ended with a stop string."""

    request: str


class SequenceArrived(FrontMessage, frozen=True):
    """A sequence is about to be submitted. `number` is its own within its front, and above 0."""

    number: int
    record: SequenceRecord


class SequenceEnded(FrontMessage, frozen=True):
    """How a sequence ended; 0 and no record: a request was refused before it became sequences."""

    number: int
    record: SequenceRecord | None
    ending: Ending
    failure: RequestFailure | None = None


class ErrorAnswered(FrontMessage, frozen=True):
    """A client was answered with an error, for `/status`."""

    failure: RequestFailure
    request_id: str
    route: str
    generation: str = ""


class CountedSample(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a metric."""

    name: str
    labels: dict[str, str]
    value: float


class Counts(FrontMessage, frozen=True):
    """The answer to `AskCounts`: open HTTP requests, and the samples of all counters and histograms by metric."""

    number: int
    num_open: int
    samples: dict[str, list[CountedSample]]


# ---- from the relay


class RelayState(FrontMessage, frozen=True):
    """What a front has to know of the deployment. It comes before any answer that depends on it, and as a heartbeat."""

    fingerprint: str | None
    longest: int | None
    classes: ServedClasses
    can_pool: bool


class AdmissionAnswer(FrontMessage, frozen=True):
    """The answer to `AskAdmission` and `AskRates`. `is_limited`: the key of the tenant has rates."""

    number: int
    refusal: RequestFailure | None = None
    headers: list[tuple[bytes, bytes]] = []
    is_limited: bool = False


class Delivered(FrontMessage, frozen=True):
    """New tokens of a sequence."""

    output: Output
    at_s: float


class Progressed(FrontMessage, frozen=True):
    """An effect that concerns a sequence, for its times: the name of its class, and its fields."""

    kind: str
    effect: msgspec.Raw
    at_s: float

    @classmethod
    def of(cls, effect: TelemetryEffect, now_s: float) -> Progressed:
        """The message for an effect."""
        return cls(type(effect).__name__, msgspec.Raw(msgspec.msgpack.encode(effect)), now_s)

    def read(self) -> TelemetryEffect:
        """The effect."""
        return msgspec.msgpack.decode(self.effect, type=EFFECTS[self.kind])  # type: ignore[no-any-return]


class ClassChosen(FrontMessage, frozen=True):
    """The KV class of the attempt of a sequence that begins."""

    request: str
    kv_class: str = RAW_CLASS
    reason: str = ""
    details: KvDetails | None = None


class Finished(FrontMessage, frozen=True):
    """A sequence is complete."""

    request: str
    reason: str
    at_s: float


class SequenceFailed(FrontMessage, frozen=True):
    """A sequence has failed."""

    request: str
    failure: RequestFailure


class AskCounts(FrontMessage, frozen=True):
    """What has the front counted?"""

    number: int


FromFront = (
    Joined
    | AskAdmission
    | AskRates
    | Submit
    | ClientsGone
    | SequenceStopped
    | SequenceArrived
    | SequenceEnded
    | ErrorAnswered
    | Counts
)
FromRelay = (
    RelayState
    | AdmissionAnswer
    | Delivered
    | Progressed
    | ClassChosen
    | Finished
    | SequenceFailed
    | AskCounts
)


def pack_requests(requests: Sequence[Request]) -> Submit:
    """The message that submits the sequences of one HTTP request."""
    prompts: list[bytes] = []
    places: dict[int, int] = {}
    sequences = []
    for request in requests:
        tokens = request.prompt
        key = id(tokens.obj) if isinstance(tokens, memoryview) else id(tokens)
        if key not in places:
            places[key] = len(prompts)
            prompts.append(token_bytes(tokens))
        sequences.append(
            SubmittedSequence(
                request.id,
                places[key],
                request.sampling,
                request.kv_class,
                request.default_class,
                request.keep,
                request.chunks,
            )
        )
    first = requests[0]
    return Submit(prompts, sequences, first.tenancy, first.entered_s[RequestStage.ADMITTED], first.deadline_s)


def unpack_requests(submit: Submit) -> list[Request]:
    """The sequences that were submitted. Those of one prompt share its bytes.

    Raises:
        ValueError: a prompt is no whole number of tokens.
    """
    if any(len(prompt) % TOKEN_BYTES for prompt in submit.prompts):
        raise ValueError("a prompt is no whole number of tokens")
    requests = []
    for one in submit.sequences:
        request = Request(
            one.name,
            memoryview(submit.prompts[one.prompt]).cast("I"),
            one.sampling,
            submit.deadline_s,
            tenancy=submit.tenancy,
            kv_class=one.kv_class,
            default_class=one.default_class,
            keep=one.keep,
            chunks=one.chunks,
        )
        request.entered_s[RequestStage.ADMITTED] = submit.arrived_s
        requests.append(request)
    return requests
