"""The preparers beside the event loop, the queue before them, and the limits on their jobs.

    prepare_body() ─ small ─▶ done at once, on the event loop
        └─ TenantQueue ─▶ an idle preparer ─▶ PreparedRequest, PreparedReply or PreparationRefused
                             └─ killed after JOB_CPU_S of CPU time or MAX_JOB_S in all; a new one is forked

A job is given to another preparer, once, if its preparer was killed from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from dataclasses import dataclass

import msgspec

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.log_format import about_request
from diptych.request import Grammar
from services.gateway.openai.validate import RequestRules, grammar_error
from services.gateway.preparation.fork_server import (
    ForkServer,
    KillPreparer,
    PreparerEnded,
    PreparerStarted,
    SlowPreparer,
)
from services.gateway.preparation.preparation_job import (
    GRAMMAR_CPU_S,
    JOB_CPU_S,
    GrammarFinding,
    PreparationFailed,
    PreparationJob,
    PreparationRefused,
    PreparationResult,
    PreparedReply,
    PreparedRequest,
    grammar_digest,
    load_job_function,
    prepare_body,
)
from services.gateway.preparation.preparer import GrammarFindings, Preparer, PreparerDied
from services.gateway.preparation.tenant_queue import TenantQueue, TenantQueueFull

# Bodies of at most this many bytes are prepared on the event loop. They take a few milliseconds at most.
MAX_INLINE_BYTES = 2048
# Most jobs, and most bytes, that may wait for preparers, per tenant.
MAX_WAITING_JOBS = 1024
MAX_WAITING_BYTES = 64 << 20
# Most seconds in the queue, and in a preparer (CPU time or not).
MAX_WAIT_S = 30.0
MAX_JOB_S = 30.0
# If a job takes more seconds than this, its preparer gets a lower priority, and retires when the job is done.
SLOW_JOB_S = 0.05
# Bodies with more bytes have the lower priority from the start.
LARGE_BODY_BYTES = 64 << 10
MAX_ATTEMPTS = 2
# Seconds to pause after a preparer could not be forked.
FORK_RETRY_S = 1.0
# Signals by which a job ends its own preparer, because CPU time or memory runs out.
TOO_COMPLEX_SIGNALS = {-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV}

log = logging.getLogger(__name__)


def default_num_preparers() -> int:
    """How many preparers to run: half of the CPU cores, between 3 and 8. One tenant may use all but one of them."""
    return max(3, min(8, len(os.sched_getaffinity(0)) // 2))


class GrammarUnchecked(Exception):
    """A grammar has not been checked yet, and must not be checked on the event loop."""


@dataclass(eq=False, slots=True)
class _WaitingJob:
    """A job, and the future of the task that waits for its result."""

    job: PreparationJob
    done: asyncio.Future[PreparedRequest | PreparedReply]
    attempts: int = 0


class PreparerPool:
    """A pool of preparer processes.

    The constructor forks, so call it before the process has threads. Call `open` on the event loop, and `close` at the
    end.
    """

    def __init__(self, rules: RequestRules, num: int | None = None) -> None:
        self.num = num or default_num_preparers()
        self.job_s, self.wait_s = MAX_JOB_S, MAX_WAIT_S
        self._server = ForkServer(lambda: load_job_function(rules))
        self._rules = rules
        self._findings = GrammarFindings()
        self._queue: TenantQueue[_WaitingJob] = TenantQueue(
            MAX_WAITING_JOBS, MAX_WAITING_BYTES, max(1, self.num - 1)
        )
        self._idle: deque[asyncio.Future[tuple[str, _WaitingJob]]] = deque()
        self._starts: dict[int, asyncio.Future[None]] = {}
        self._ends: dict[int, asyncio.Future[int | None]] = {}
        self._names = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._gone: asyncio.Future[None] | None = None

    def open(self) -> None:
        """Begin to take jobs. Call it on the running event loop."""
        loop = asyncio.get_running_loop()
        self._gone = loop.create_future()
        loop.add_reader(self._server.control.fileno(), self._read_reports)
        self._tasks = [loop.create_task(self._run_slot()) for _ in range(self.num)]
        for task in self._tasks:
            task.add_done_callback(self._slot_ended)

    async def wait_for_failure(self) -> None:
        """Wait until the pool fails; never returns otherwise.

        Raises:
            OSError: the fork server has ended. This process has to be started again.
        """
        assert self._gone is not None, "open it first"
        await self._gone

    def close(self) -> None:
        """End all preparers. Idempotent."""
        for task in self._tasks:
            # The error means that the event loop is closed.
            with contextlib.suppress(RuntimeError):
                task.get_loop().remove_reader(self._server.control.fileno())
                task.cancel()
        self._tasks = []
        self._server.close()

    async def prepare_body(self, job: PreparationJob) -> PreparedRequest | PreparedReply:
        """Prepare a body, on the event loop if it is small and else in a preparer.

        A small body whose grammar has not been checked yet is given up on the loop before its prompts are rendered, and
        prepared by a preparer.

        Raises:
            RequestError: the body is refused, takes too long, or too many bodies wait.
        """
        if len(job.body) <= MAX_INLINE_BYTES:
            with contextlib.suppress(GrammarUnchecked):
                return prepare_body(job, self._rules, self._known_rejection)
        tenant, loop = job.caller.tenant, asyncio.get_running_loop()
        waiting = _WaitingJob(job, loop.create_future())
        try:
            self._queue.push(tenant, waiting, len(job.body))
        except TenantQueueFull:
            whose = " of this key" if tenant else ""
            reason = FailureReason.TENANT_PREPARATION_FULL if tenant else FailureReason.PREPARATION_FULL
            problem = f"too many bodies{whose} wait to be prepared"
            raise RequestError(RequestFailure(reason, problem)) from None
        self._match_jobs()
        overdue = loop.call_later(self.wait_s, self._expire_job, waiting)
        try:
            return await waiting.done
        finally:
            overdue.cancel()
            self._queue.remove_item(tenant, waiting)

    def _expire_job(self, waiting: _WaitingJob) -> None:
        if self._queue.remove_item(waiting.job.caller.tenant, waiting) and not waiting.done.done():
            failure = RequestFailure(FailureReason.PREPARATION_FULL, "too many bodies wait to be prepared")
            waiting.done.set_exception(RequestError(failure))

    def _match_jobs(self) -> None:
        """Give waiting jobs to idle preparers."""
        while self._idle:
            if self._idle[0].done():  # cancelled
                self._idle.popleft()
            elif (found := self._queue.pop()) is not None:
                self._idle.popleft().set_result(found)
            else:
                return

    async def _run_slot(self) -> None:
        """Run one preparer after the other, and give each one job after the other."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                preparer = await self.fork_preparer()
            except OSError as error:
                # There is too little memory, or there are too few processes or descriptors, at the moment.
                log.warning("no preparer can be started: %s; trying again in %g s", error, FORK_RETRY_S)
                await asyncio.sleep(FORK_RETRY_S)
                continue
            try:
                while not preparer.retired:
                    waiting_job: asyncio.Future[tuple[str, _WaitingJob]] = loop.create_future()
                    self._idle.append(waiting_job)
                    self._match_jobs()
                    tenant, waiting = await waiting_job
                    try:
                        await self._run_job(preparer, waiting)
                    finally:
                        self._queue.mark_done(tenant)
                        self._match_jobs()
            finally:
                preparer.close()

    async def _run_job(self, preparer: Preparer, waiting: _WaitingJob) -> None:
        waiting.attempts += 1
        large = len(waiting.job.body) > LARGE_BODY_BYTES
        slow = asyncio.get_running_loop().call_later(
            0 if large else SLOW_JOB_S, self._slow_preparer, preparer
        )
        outcome: PreparedRequest | PreparedReply | Exception
        try:
            async with asyncio.timeout(self.job_s):
                frame = msgspec.msgpack.encode(waiting.job)
                outcome = _outcome_of_result(await preparer.run_job(frame, self._findings))
        except TimeoutError:
            preparer.retired = True
            self._server.send_order(KillPreparer(preparer.name))
            about = about_request(waiting.job.caller.request_ids)
            log.warning("a preparer was killed: its job took more than %g s", self.job_s, extra=about)
            problem = "the body could not be prepared in time"
            outcome = RequestError(RequestFailure(FailureReason.PREPARATION_TIMEOUT, problem))
        except PreparerDied as died:
            preparer.retired = True
            if self._retry_job(died, waiting):
                return
            log.warning("%s on a job", died, extra=about_request(waiting.job.caller.request_ids))
            outcome = self._error_of_job(died)
        finally:
            slow.cancel()
        if waiting.done.done():
            # The client has left, or the job has expired.
            return
        if isinstance(outcome, Exception):
            waiting.done.set_exception(outcome)
        else:
            waiting.done.set_result(outcome)

    def _slow_preparer(self, preparer: Preparer) -> None:
        preparer.retired = True
        self._server.send_order(SlowPreparer(preparer.name))

    def _retry_job(self, died: PreparerDied, waiting: _WaitingJob) -> bool:
        """Queue a job again if its preparer was killed from outside for the first time. Returns whether it did."""
        if died.status in TOO_COMPLEX_SIGNALS or waiting.attempts >= MAX_ATTEMPTS or waiting.done.done():
            return False
        about = about_request(waiting.job.caller.request_ids)
        log.warning("%s; its job is given to another one", died, extra=about)
        with contextlib.suppress(TenantQueueFull):
            self._queue.push(waiting.job.caller.tenant, waiting, len(waiting.job.body))
            return True
        return False

    def _error_of_job(self, died: PreparerDied) -> Exception:
        """The error for a client whose job ended its preparer."""
        if died.status not in TOO_COMPLEX_SIGNALS:
            return RuntimeError(f"preparers end with status {died.status} on this body")
        if died.checking is None:
            problem = f"the body takes more than {JOB_CPU_S:g} s to be prepared, or too much memory"
            return RequestError(RequestFailure(FailureReason.REQUEST_TOO_COMPLEX, problem))
        why = f"its check takes more than {GRAMMAR_CPU_S:g} s, or too much memory"
        self._findings.store_finding(died.checking.grammar, GrammarFinding(why))
        return grammar_error(why, died.checking.field)

    def end_preparer(self, preparer: Preparer) -> None:
        """Kill a preparer, whatever it does."""
        self._server.send_order(KillPreparer(preparer.name))
        preparer.close()

    async def fork_preparer(self, nice: int = 0) -> Preparer:
        """Start a preparer, whose priority is lowered to `nice`. Raises OSError if that is not possible just now."""
        self._names += 1
        name = self._names
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        ended: asyncio.Future[int | None] = loop.create_future()
        self._starts[name], self._ends[name] = started, ended
        try:
            connection = self._server.start_preparer(name)
            try:
                await started
                if nice:
                    self._server.send_order(SlowPreparer(name, nice))
                reader, writer = await asyncio.open_unix_connection(sock=connection)
            except BaseException:
                connection.close()
                raise
        except BaseException:
            self._ends.pop(name, None)
            raise
        finally:
            self._starts.pop(name, None)
        return Preparer(name, reader, writer, ended)

    def _read_reports(self) -> None:
        """Handle all reports of the fork server that have arrived."""
        try:
            while (report := self._server.receive_report()) is not None:
                self._apply_report(report)
        except OSError as error:
            asyncio.get_running_loop().remove_reader(self._server.control.fileno())
            self._fail_pool(error)

    def _slot_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail_pool(error)

    def _fail_pool(self, error: BaseException) -> None:
        if self._gone is not None and not self._gone.done():
            self._gone.set_exception(error)

    def _apply_report(self, report: PreparerStarted | PreparerEnded) -> None:
        started = self._starts.get(report.name)
        if isinstance(report, PreparerStarted):
            if started is not None and not started.done():
                started.set_result(None)
            return
        if started is not None and not started.done():
            started.set_exception(OSError(report.error))
        ended = self._ends.pop(report.name, None)
        if ended is not None and not ended.done():
            ended.set_result(report.status)

    def _known_rejection(self, grammar: Grammar, field: str) -> str | None:
        finding = self._findings.get_finding(grammar_digest(grammar))
        if finding is None:
            raise GrammarUnchecked
        return finding.why


def _outcome_of_result(result: PreparationResult) -> PreparedRequest | PreparedReply | Exception:
    if isinstance(result, PreparationRefused):
        return RequestError(result.failure)
    if isinstance(result, PreparationFailed):
        # The preparer's traceback is in the log.
        return RuntimeError(f"a body could not be prepared: {result.error}")
    return result
