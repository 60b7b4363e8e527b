"""A front's end of the link to the relay's process: the `GenerationBackend` of its generations.

The relay decides: what is asked here is answered there. If the link is lost, every open request ends with an error.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

from diptych.chunks import RAW_CLASS
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.request import Request
from router.workers.kv_classes import ServedClasses
from services.gateway.fronts.frame_link import FrameLink, connect_unix
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
    FromRelay,
    FrontMessage,
    Joined,
    Progressed,
    RelayState,
    SequenceArrived,
    SequenceEnded,
    SequenceFailed,
    SequenceStopped,
    pack_requests,
)
from services.gateway.generation.generation import SequenceSink
from services.gateway.metrics.recent_events import RecentErrors
from services.gateway.outcomes import EndedSequence, OutcomeSink, SequenceRecord

RELAY_LOST = RequestFailure(
    FailureReason.SERVER_SHUTTING_DOWN, "the gateway's relay has ended; it is started again"
)
# The number of counts that nobody asked for, and how long a front that leaves waits for the relay to take them.
LAST_COUNT, LEAVE_S = 0, 1.0
UNKNOWN_STATE = RelayState(None, None, ServedClasses([RAW_CLASS], [RAW_CLASS]), True)


class RelayClient(OutcomeSink):
    """Asks the relay's process, and hands on what it says. `on_lost` is called once the link is lost."""

    def __init__(
        self,
        name: str,
        on_lost: Callable[[], None],
        count: Callable[[int], Counts] = lambda n: Counts(n, 0, {}),
    ) -> None:
        """`count` makes the answer to `AskCounts`."""
        self.name, self.state, self.is_lost = name, UNKNOWN_STATE, False
        self.latest_s = time.monotonic()
        self.count, self._on_lost_link = count, on_lost
        self._link: FrameLink[FromRelay] = FrameLink(FromRelay, self._on_messages, self._on_lost)  # type: ignore[arg-type]
        self._sinks: dict[str, SequenceSink] = {}
        self._asked: dict[int, asyncio.Future[AdmissionAnswer]] = {}
        self._numbers = itertools.count(1)
        # The number of each sequence whose end is not known yet, by its record's id.
        self._pending: dict[int, int] = {}
        self._welcome: asyncio.Future[None] | None = None

    async def connect(self, address: str) -> None:
        """Join the relay's process, and wait until it has said what it serves. Raises OSError if it is not there."""
        loop, connection = asyncio.get_running_loop(), await connect_unix(address)
        self._welcome = loop.create_future()
        await loop.create_unix_connection(lambda: self._link, sock=connection)
        self._link.send(Joined(self.name))
        await self._welcome

    async def leave(self) -> None:
        """Tell the relay what this front has counted since it was asked, and end the link."""
        self._link.send(self.count(LAST_COUNT))
        await self._link.flush(LEAVE_S)
        self.close()

    def close(self) -> None:
        """End the link. Idempotent."""
        self._link.close()

    # ---- what the front asks

    async def ask_admission(self, tenant: str, rated: bool) -> AdmissionAnswer:
        """Whether a request of `tenant` would be refused now. `rated`: it counts for the rates of its key."""
        return await self._ask(lambda number: AskAdmission(number, tenant, rated))

    async def ask_rates(self, tenant: str) -> AdmissionAnswer:
        """The headers that say what is left of the rates of a key."""
        return await self._ask(lambda number: AskRates(number, tenant))

    async def _ask(self, make_question: Callable[[int], FrontMessage]) -> AdmissionAnswer:
        number = next(self._numbers)
        if self.is_lost:
            return AdmissionAnswer(number, RELAY_LOST)
        answer: asyncio.Future[AdmissionAnswer] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._link.send(make_question(number))
        try:
            return await answer
        finally:
            self._asked.pop(number, None)

    def submit_requests(self, asked_requests: Sequence[tuple[Request, SequenceSink]]) -> None:
        """Start the sequences of one HTTP request: all of them, or none."""
        if self.is_lost:
            return asked_requests[0][1].fail_sequence(RELAY_LOST)
        self._sinks.update((request.id, sink) for request, sink in asked_requests)
        self._link.send(pack_requests([request for request, _ in asked_requests]))

    def cancel_request(self, request: str, *others: str) -> None:
        """Cancel sequences of one HTTP request because its client has left."""
        gone = [name for name in (request, *others) if self._sinks.pop(name, None) is not None]
        if gone:
            self._link.send(ClientsGone(gone))

    def stop_request(self, request: str) -> None:
        """Stop a sequence whose text has ended."""
        self._link.send(SequenceStopped(request))

    def find_refusal(self, num_requests: int, tenant: str) -> RequestFailure | None:
        """Whether the relay is there; it has been asked for admission before (`RelayAdmission`)."""
        return RELAY_LOST if self.is_lost else None

    def on_arrived(self, record: SequenceRecord, now_s: float) -> None:
        """Tell the relay of a sequence that arrives."""
        number = self._pending[id(record)] = next(self._numbers)
        self._link.send(SequenceArrived(number, record))

    def on_ended(self, ended: EndedSequence) -> None:
        """Tell the relay how a sequence ended."""
        number = 0 if ended.record is None else self._pending.pop(id(ended.record))
        self._link.send(SequenceEnded(number, ended.record, ended.ending, ended.failure))

    def report_error(self, error: ErrorAnswered) -> None:
        """Tell the relay that a client was answered with an error."""
        self._link.send(error)

    # ---- what the relay says

    def _on_messages(self, messages: Sequence[FrontMessage]) -> None:
        self.latest_s = time.monotonic()
        for message in messages:
            self._take(message)

    def _take(self, message: FrontMessage) -> None:
        """Handle one message."""
        match message:
            case Delivered(output, at_s):
                if (sink := self._sinks.get(output.request)) is not None:
                    sink.deliver_output(output, at_s)
            case Progressed(at_s=at_s):
                effect = message.read()
                if (sink := self._sinks.get(effect.request)) is not None:
                    sink.record_effect(effect, at_s)
            case ClassChosen(request, kv_class, reason, details):
                if (sink := self._sinks.get(request)) is not None:
                    sink.record_kv_class(kv_class, reason, details)
            case Finished(request, reason, at_s):
                if (sink := self._sinks.pop(request, None)) is not None:
                    sink.finish_sequence(reason, at_s)
            case SequenceFailed(request, failure):
                if (sink := self._sinks.pop(request, None)) is not None:
                    sink.fail_sequence(failure)
            case AdmissionAnswer(number):
                answer = self._asked.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case RelayState():
                self.state = message
                if self._welcome is not None and not self._welcome.done():
                    self._welcome.set_result(None)
            case AskCounts(number):
                self._link.send(self.count(number))

    def _on_lost(self) -> None:
        """The relay's process is gone, or has given this one up: all that is open fails."""
        self.is_lost = True
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(ConnectionError("it does not answer"))
        for number, answer in self._asked.items():
            if not answer.done():
                answer.set_result(AdmissionAnswer(number, RELAY_LOST))
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail_sequence(RELAY_LOST)
        self._on_lost_link()


class RelayedErrors(RecentErrors):
    """Hands errors that clients saw to the relay's process, which shows them in `/status`."""

    def __init__(self, client: RelayClient) -> None:
        super().__init__()
        self._client = client

    def add_error(
        self, now_s: float, failure: RequestFailure, request_id: str, route: str, generation: str = ""
    ) -> None:
        """Hand an error on."""
        self._client.report_error(ErrorAnswered(failure, request_id, route, generation))
