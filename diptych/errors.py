"""Every error that crosses a boundary, in one tree.

DiptychError                 what happened, why, what to do (at most six lines in all when shown)
├── ConfigError              a flag, an environment name or a YAML key is wrong; the process does not start
├── ModelError               the model cannot be found, read, or does not fit; the process does not start
├── StartError               a port, Ray, a worker or the canary failed while starting
├── RequestError             the client's fault or the service's state, with an HTTP status and an OpenAI code
├── OutOfBlocks              a pool has fewer free slabs than were asked for
├── GrammarError             a structured-output grammar does not compile
├── ChannelError             a message is malformed, too large, or came from a stranger
└── TransferError            KV did not arrive
    ├── CorruptChunk         it arrived, and is not what was offered
    └── StaleTicket          the ticket is of another epoch, worker life, layout or model
"""

from __future__ import annotations


class DiptychError(Exception):
    """An expected failure, told in three parts.

    `what` happened in one sentence; `why`, the facts that led to it; `fix`, what to do now.
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix

    def lines(self) -> list[str]:
        """The message as shown on a terminal: at most six lines, no traceback."""
        told = [f"error: {self.what}"]
        told += [
            f"  why: {line}" if i == 0 else f"       {line}" for i, line in enumerate(self.why.splitlines())
        ]
        told += [
            f"  fix: {line}" if i == 0 else f"       {line}" for i, line in enumerate(self.fix.splitlines())
        ]
        return told[:6]


class ConfigError(DiptychError):
    """A setting is unknown, of the wrong type or out of range."""


class ModelError(DiptychError):
    """The model is not there, not readable, not supported, or does not fit in memory."""


class StartError(DiptychError):
    """The deployment could not be brought up."""


class RequestError(DiptychError):
    """A request is refused or has failed; rendered as an OpenAI error body.

    `status` is the HTTP status, `kind` OpenAI's `type`, `code` a stable machine-readable name, `param` the field at
    fault. `retry` says whether an official client should try again (`x-should-retry`); `retry_after_s` when.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = "invalid_value",
        param: str | None = None,
        retry: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.retry, self.retry_after_s = retry, retry_after_s

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error object; all four keys are always there."""
        return {"error": {"message": self.what, "type": self.kind, "param": self.param, "code": self.code}}


class OutOfBlocks(DiptychError):
    """A pool cannot give the slabs that were asked for; nothing was taken."""


class GrammarError(DiptychError):
    """A structured-output grammar does not compile."""


class ChannelError(DiptychError):
    """A frame could not be accepted: malformed, too large, or unauthenticated."""


class TransferError(DiptychError):
    """KV did not arrive."""


class CorruptChunk(TransferError):
    """A chunk's digest does not match what its ticket promised; it must never be decoded."""


class StaleTicket(TransferError):
    """A ticket speaks of another epoch, incarnation, KV layout or model fingerprint."""
