"""The relay's end of the link to one front: submits what the front was asked, and cancels all of it if the front dies.

front ─▶ FrontPeer ─ submit_requests ─▶ RatedBackend, RelayBackend
front ◀─ RelayedSink ◀──────────────── tokens, ends
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.messages import Output
from router.effects import TelemetryEffect
from services.gateway.fronts.frame_link import MAX_WAITING_BYTES, FrameLink
from services.gateway.fronts.wire import (
    AdmissionAnswer,
    AskAdmission,
    AskCounts,
    AskRates,
    ClassChosen,
    ClientsGone,
    Counts,
    Delivered,
    ErrorAnswered,
    Finished,
    FromFront,
    FrontMessage,
    Joined,
    Progressed,
    RelayState,
    SequenceArrived,
    SequenceEnded,
    SequenceFailed,
    SequenceStopped,
    Submit,
    unpack_requests,
)
from services.gateway.keys.key_watch import KeyFileWatch
from services.gateway.openai.schemas.response_schema import KvDetails
from services.gateway.outcomes import GATEWAY_FAILED, Ending, SequenceRecord
from services.gateway.service import GatewayService

log = logging.getLogger(__name__)
LINK_FULL = RequestFailure(
    FailureReason.ANSWER_MEMORY_FULL,
    "log-probabilities of prompts fill the memory that the gateway has for them; ask for fewer at once",
)
KEY_GONE = RequestFailure(FailureReason.INVALID_API_KEY, "the API key is not accepted any more")


class FrontOwner(Protocol):
    """Is told of the fronts."""

    def add_peer(self, peer: FrontPeer) -> None:
        """A front has joined."""

    def remove_peer(self, peer: FrontPeer) -> None:
        """A front that had joined is gone."""


class FrontPeer:
    """One front, as long as its link lasts. `name` is empty until it has joined."""

    def __init__(self, service: GatewayService, key_watch: KeyFileWatch | None, owner: FrontOwner) -> None:
        self.name, self.counts = "", Counts(0, 0, {})
        self._service, self._key_watch, self._owner = service, key_watch, owner
        self._named_keys = None if key_watch is None else key_watch.keys
        self._admitting = set[asyncio.Task[None]]()
        self.link: FrameLink[FromFront] = FrameLink(FromFront, self._on_messages, self._on_lost)  # type: ignore[arg-type]
        self._sent_state: RelayState | None = None
        self.open: set[str] = set()
        self._pending: dict[int, SequenceRecord] = {}
        self._counting: dict[int, asyncio.Future[None]] = {}

    def send_state(self, is_beat: bool = False) -> None:
        """Tell the front of the deployment, if that has changed, or as a heartbeat."""
        service = self._service
        state = RelayState(
            service.fingerprint(), service.longest(), service.kv_classes(), service.workers_pool()
        )
        if is_beat or state != self._sent_state:
            self._sent_state = state
            self.link.send(state)

    async def ask_counts(self, timeout_s: float) -> None:
        """Bring `counts` up to date, if the front answers in time."""
        number = self.counts.number + 1
        answer = self._counting.setdefault(number, asyncio.get_running_loop().create_future())
        self.link.send(AskCounts(number))
        await asyncio.wait([answer], timeout=timeout_s)

    def end_sequence(self, request: str) -> None:
        """A sequence needs no cancelling any more."""
        self.open.discard(request)

    def cancel_sequence(self, request: str) -> None:
        """Cancel a sequence that goes on."""
        self.end_sequence(request)
        self._service.backend.cancel_request(request)

    def _on_messages(self, messages: Sequence[FrontMessage]) -> None:
        for message in messages:
            if not self.name and not isinstance(message, Joined):
                raise ValueError("a front speaks before it has joined")
            self._take(message)

    def _take(self, message: FrontMessage) -> None:
        """Handle one message."""
        service = self._service
        match message:
            case Submit():
                self._submit(message)
            case SequenceArrived(number, record):
                self._pending[number] = record
                service.outcomes.add_arrival(record)
            case SequenceEnded(number, record, ending, failure):
                self._pending.pop(number, None)
                service.outcomes.end_sequence(record, ending, failure)
            case AskAdmission(number, tenant, rated):
                self.send_state()
                if rated and self._named_keys is not None and not self._named_keys.accepts_tenant(tenant):
                    self._admit_later(message)
                else:
                    self.link.send(self._check_admission(number, tenant, rated))
            case AskRates(number, tenant):
                self.link.send(AdmissionAnswer(number, headers=self._rate_headers(tenant)))
            case ClientsGone(requests):
                self.open.difference_update(requests)
                service.backend.cancel_request(*requests)
            case SequenceStopped(request):
                service.backend.stop_request(request)
            case ErrorAnswered(failure, request_id, route, generation):
                service.errors.add_error(time.monotonic(), failure, request_id, route, generation)
            case Counts(number):
                self.counts = message
                if (waiting := self._counting.pop(number, None)) is not None and not waiting.done():
                    waiting.set_result(None)
            case Joined(name):
                self.name = name
                self._owner.add_peer(self)
                self.send_state()

    def _submit(self, submit: Submit) -> None:
        requests = unpack_requests(submit)
        self.open.update(request.id for request in requests)
        self._service.backend.submit_requests(
            [(request, RelayedSink(self, request.id)) for request in requests]
        )

    def _admit_later(self, asked: AskAdmission) -> None:
        """Answer when the keys' file is read. Either the front has seen a newer one, and the key's rates are in it, or
        it has not yet seen that the key is gone, which then would have no rates.
        """
        assert self._key_watch is not None
        watch = self._key_watch

        async def admit() -> None:
            # The front gets an answer whatever happens to the file.
            try:
                await watch.wait_for_tenant(asked.tenant)
            finally:
                accepted = watch.keys.accepts_tenant(asked.tenant)
                answer = self._check_admission(asked.number, asked.tenant, asked.rated) if accepted else None
                self.link.send(answer or AdmissionAnswer(asked.number, KEY_GONE))

        task = asyncio.create_task(admit())
        self._admitting.add(task)
        task.add_done_callback(self._admitting.discard)

    def _check_admission(self, number: int, tenant: str, rated: bool) -> AdmissionAnswer:
        """Whether a request may come, by the rates of its key if it is `rated`, and by the load."""
        rates = self._named_keys.rates_of_tenant(tenant) if self._named_keys and rated else None
        is_limited = rates is not None and bool(rates.windows)
        refusal = rates.find_refusal(0, time.monotonic()) if rates is not None and is_limited else None
        refusal = refusal or self._service.backend.find_refusal(1, tenant)
        headers = self._rate_headers(tenant) if is_limited and refusal is not None else []
        return AdmissionAnswer(number, refusal, headers, is_limited)

    def _rate_headers(self, tenant: str) -> list[tuple[bytes, bytes]]:
        rates = self._named_keys.rates_of_tenant(tenant) if self._named_keys else None
        return [] if rates is None else rates.headers(time.monotonic())

    def _on_lost(self) -> None:
        """The front is gone: nobody reads what it has asked for."""
        if self.open:
            log.warning("front %s is lost: its %d sequences are cancelled", self.name, len(self.open))
            gone, self.open = list(self.open), set()
            self._service.backend.cancel_request(*gone)
        pending, self._pending = self._pending, {}
        for record in pending.values():
            self._service.outcomes.end_sequence(record, Ending.FAILED, GATEWAY_FAILED)
        for waiting in self._counting.values():
            if not waiting.done():
                waiting.set_result(None)
        if self.name:
            self._owner.remove_peer(self)


class RelayedSink:
    """The `SequenceSink` of a sequence of a front: hands everything on over the link."""

    def __init__(self, peer: FrontPeer, request: str) -> None:
        self._peer, self._request, self._send = peer, request, peer.link.send

    def deliver_output(self, output: Output, now_s: float) -> None:
        """Hand on new tokens. Scores of a prompt are large: if the front does not keep up, this sequence fails, and
        not the link with all of them.
        """
        if output.prompt_logprobs and self._peer.link.waiting_bytes > MAX_WAITING_BYTES:
            self._peer.cancel_sequence(self._request)
            self._send(SequenceFailed(self._request, LINK_FULL))
        else:
            self._send(Delivered(output, now_s))

    def record_effect(self, effect: TelemetryEffect, now_s: float) -> None:
        """Hand on what happened to the sequence."""
        self._send(Progressed.of(effect, now_s))

    def record_kv_class(self, kv_class: str, reason: str, details: KvDetails | None) -> None:
        """Hand on the KV class of the attempt that begins."""
        self._send(ClassChosen(self._request, kv_class, reason, details))

    def finish_sequence(self, reason: str, now_s: float) -> None:
        """Hand on that the sequence is complete."""
        self._peer.end_sequence(self._request)
        self._send(Finished(self._request, reason, now_s))

    def fail_sequence(self, failure: RequestFailure) -> None:
        """Hand on that the sequence has failed."""
        self._peer.end_sequence(self._request)
        self._send(SequenceFailed(self._request, failure))
