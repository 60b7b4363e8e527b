"""Every error that crosses a package boundary, in one tree.

DiptychError                 what happened, why, what to do (at most six lines in all when shown)
├── ConfigError              a flag, an environment name or a YAML key is wrong; the process does not start
├── ModelError               the model cannot be found, read, or does not fit; the process does not start
├── StartError               a port, Ray, a worker or the canary failed while starting
│   └── WorkerRejected       the gateway rejects this worker: the worker ends, and is not started again
├── RequestError             a request is refused or fails, for one of the reasons in `diptych/failure_statuses.py`
├── OutOfSlabs               a pool has fewer free slabs than were asked for
├── GrammarError             a structured-output grammar does not compile
├── ChannelError             a message is malformed, too large, or came from an unknown sender
└── TransferError            KV did not arrive
    ├── CorruptChunk         the KV arrived, but differs from the offered KV
    └── StaleTicket          the ticket is for another epoch, worker life, layout or model

DeviceLost, no Exception     a GPU failed: the process ends
"""

from __future__ import annotations

import math

from diptych.failure_statuses import RequestFailure


class DiptychError(Exception):
    """An expected failure, described in three parts for the user.

    `what` is one sentence that says what happened; `why` gives the facts that led to it; `fix` says what to do.
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix

    def lines(self) -> list[str]:
        """The text for a terminal: at most six lines, no traceback."""
        shown = [f"error: {self.what}"]
        shown += [
            f"  why: {line}" if i == 0 else f"       {line}" for i, line in enumerate(self.why.splitlines())
        ]
        shown += [
            f"  fix: {line}" if i == 0 else f"       {line}" for i, line in enumerate(self.fix.splitlines())
        ]
        return shown[:6]


class DeviceLost(BaseException):
    """A device failed, and with it everything in its memory: the process has to end.

    No request is to blame, and trying again in this process fails too. So this is no `Exception`, and passes through
    code that fails single requests. `error` says it to the supervisor (`diptych.process.exit_lost`).
    """

    def __init__(self, reason: str) -> None:
        line = " ".join(reason.split())[:300]
        super().__init__(line)
        self.error = DiptychError("the device failed", line, "the worker is restarted by its supervisor")


# How torch, cuBLAS and Triton begin the texts of errors of a device.
_DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")


def find_device_loss(error: BaseException) -> DeviceLost | None:
    """The DeviceLost that `error` is or stands for; None of all other errors. Running out of memory is no such failure.

    After such an error every later call of CUDA fails too. torch's errors are recognised by name and by how their text
    begins, so that torch need not be imported here, and that no text of a request looks like one.
    """
    if isinstance(error, DeviceLost):
        return error
    names = {kind.__name__ for kind in type(error).__mro__}
    if not isinstance(error, RuntimeError) or "OutOfMemoryError" in names:
        return None
    if "AcceleratorError" in names or str(error).startswith(_DEVICE_ERRORS):
        return DeviceLost(f"{type(error).__name__}: {error}")
    return None


def raise_if_lost(error: BaseException) -> None:
    """Raises DeviceLost if `error` says that a device failed (`find_device_loss`)."""
    if (lost := find_device_loss(error)) is not None:
        raise lost from error


class ConfigError(DiptychError):
    """A setting is unknown, of the wrong type or out of range."""


class ModelError(DiptychError):
    """The model was not found, is not readable, not supported, or does not fit in memory."""


class StartError(DiptychError):
    """The deployment could not be started."""


class WorkerRejected(StartError):
    """The gateway rejects this worker, now and later."""


class RequestError(DiptychError):
    """A request is refused or has failed; `failure` says why, and what its client is shown."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class OutOfSlabs(DiptychError):
    """A pool has fewer free slabs than were asked for; none was taken."""


class GrammarError(DiptychError):
    """A structured-output grammar does not compile."""


class ChannelError(DiptychError):
    """A frame was refused: malformed, too large, or not authenticated."""


class TransferError(DiptychError):
    """KV did not arrive."""


class CorruptChunk(TransferError):
    """A chunk does not match the digest in its ticket; it must never be used for decoding."""


class StaleTicket(TransferError):
    """A ticket is for another epoch, incarnation, KV layout or model fingerprint."""


MIB, GIB = 1 << 20, 1 << 30


def show_bytes(num_bytes: float) -> str:
    """A size in the text of an error, in MiB or GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def size_setting(num_bytes: float) -> str:
    """The value of a setting that allows at least `num_bytes`, in whole MiB (`diptych.config.values.byte_size`)."""
    return f"{math.ceil(num_bytes / MIB)}MiB"
