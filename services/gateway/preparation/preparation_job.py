"""One job of a preparer: the messages between it and the event loop, and the limits on its CPU time.

What is done with a body is in `resolve_body`. The event loop does the same for small bodies, see `preparer_pool`.
"""

from __future__ import annotations

import logging
import signal

import msgspec

from diptych.errors import RequestError
from diptych.failure_statuses import MAX_MESSAGE_CHARS, FailureReason, RequestFailure
from diptych.hashing import hash_fields
from diptych.logs.log_format import about_request
from diptych.logs.shown_text import shorten_text
from diptych.request import Grammar
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.schemas.batch_schema import check_batch_body
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.translated import GrammarCheck
from services.gateway.openai.validate import RequestRules
from services.gateway.preparation.file_job import FileJob, run_file_job
from services.gateway.preparation.fork_server import FrameSocket, JobFunction
from services.gateway.preparation.grammar_check import GrammarChecker
from services.gateway.preparation.resolve_body import resolve_body

# Seconds of CPU time for one job, and for the grammar check within it. A preparer that needs more is killed by
# SIGPROF.
JOB_CPU_S = 5.0
GRAMMAR_CPU_S = 2.0
# The route of jobs that check the body of a new batch. Their reply is that body again, which is then small.
BATCH_ROUTE = "batch"

log = logging.getLogger(__name__)


class PreparationJob(msgspec.Struct, frozen=True, eq=False, tag=True):
    """A body with its caller. `route` is batch, or a key of `resolve_body.ROUTES`."""

    route: str
    body: bytes
    caller: Caller


class PreparedRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The result for a body that asks for generation."""

    ask: ResolvedRequest


class PreparedReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The result for a body that needs no generation: the body of the response."""

    body: bytes


class PreparationRefused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The result for a body that is refused."""

    failure: RequestFailure


class PreparationFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The preparation failed because of a bug; the preparer's log has the traceback."""

    error: str


class GrammarQuery(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A preparer is about to check a grammar, whose digest is `grammar`, and which the client's `field` asks for.

    The gateway answers with a `GrammarFinding`, or with None if it knows none.
    """

    grammar: bytes  # a digest
    field: str


class GrammarFinding(msgspec.Struct, frozen=True, array_like=True):
    """The reason `why` a grammar cannot be served; None if it can."""

    why: str | None = None


class GrammarChecked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a preparer found that has checked a grammar."""

    finding: GrammarFinding


PreparationResult = PreparedRequest | PreparedReply | PreparationRefused | PreparationFailed

_encoder = msgspec.msgpack.Encoder()
_jobs = msgspec.msgpack.Decoder(PreparationJob | FileJob)
_findings = msgspec.msgpack.Decoder(GrammarFinding | None)


def prepare_body(
    job: PreparationJob, rules: RequestRules, check: GrammarCheck
) -> PreparedRequest | PreparedReply:
    """Prepare a body. `check` is that of `resolve_body`.

    Raises:
        RequestError: the body is refused.
    """
    if job.route == BATCH_ROUTE:
        return PreparedReply(check_batch_body(job.body))
    resolved = resolve_body(job.route, job.body, job.caller, rules, check)
    return PreparedReply(resolved) if isinstance(resolved, bytes) else PreparedRequest(resolved)


def grammar_digest(grammar: Grammar) -> bytes:
    """The name of a grammar among the processes that check and remember grammars."""
    return hash_fields(["grammar", grammar.kind, grammar.text])


def load_job_function(rules: RequestRules) -> JobFunction:
    """The function that a preparer runs on each job. Loads what grammar checks need.

    It takes the bytes of a `PreparationJob` or a `FileJob`, and returns those of its result.
    """
    grammars = GrammarChecker(rules.tokenizer)

    def work(job: bytes, gateway: FrameSocket) -> bytes:
        def check(grammar: Grammar, field: str) -> str | None:
            gateway.write_frame(_encoder.encode(GrammarQuery(grammar_digest(grammar), field)))
            known: GrammarFinding | None = _findings.decode(gateway.read_frame() or b"\xc0")
            if known is not None:
                return known.why
            _limit_cpu_time(GRAMMAR_CPU_S)
            finding = GrammarFinding(grammars.rejection_reason(grammar, field))
            _limit_cpu_time(JOB_CPU_S)
            gateway.write_frame(_encoder.encode(GrammarChecked(finding)))
            return finding.why

        _limit_cpu_time(JOB_CPU_S)
        asked: PreparationJob | FileJob = _jobs.decode(job)
        done = _run_job(asked, rules, check) if isinstance(asked, PreparationJob) else run_file_job(asked)
        result = _encoder.encode(done)
        _limit_cpu_time(0)
        return result

    return work


def _limit_cpu_time(cpu_s: float) -> None:
    """Have the kernel kill this process after `cpu_s` more seconds of CPU time; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _run_job(job: PreparationJob, rules: RequestRules, check: GrammarCheck) -> PreparationResult:
    try:
        return prepare_body(job, rules, check)
    except RequestError as error:
        return PreparationRefused(error.failure)
    except MemoryError:
        problem = "the body takes too much memory to be prepared"
        return PreparationRefused(RequestFailure(FailureReason.PREPARATION_OUT_OF_MEMORY, problem))
    except Exception as error:
        about = about_request(job.caller.request_ids)
        log.exception("a body for %s could not be prepared", job.route, extra=about)
        return PreparationFailed(shorten_text(f"{type(error).__name__}: {error}", MAX_MESSAGE_CHARS))
