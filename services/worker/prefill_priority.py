"""Whether a prefill worker lets threads that wake interrupt its prompts, and how that is asked of the kernel.

A prompt keeps a core busy for milliseconds at a time. Where workers and gateway have fewer cores than they could use,
a token that is due there, or a message that brings it to its client, would wait until the prompt's time slice is over.
So the thread that computes prompts asks for a long slice: since Linux 6.12 a thread with a shorter one interrupts it as
soon as it wakes. Its share of the core stays the same, so prompts never starve, and neither the change nor its end
needs a privilege. A lower nice level would take most of the core away from it where other programs run.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

# Values of `--prefill-yields`.
AUTO, ALWAYS, NEVER = "auto", "always", "never"
# Longer than the kernel's own, which has 0.7 to 3 ms by the number of cores; and short, since a thread that computes,
# and does not wake, may have to wait for its end.
YIELDING_SLICE_MS = 10.0
# The numbers of sched_setattr(2) and sched_getattr(2), by machine.
SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}


@dataclass(frozen=True, slots=True)
class HostLoad:
    """What computes on a host: the threads of all workers there, and a gateway. `num_cores` are those it may use."""

    num_cores: int
    num_threads: int
    has_gateway: bool

    @property
    def shares_cores(self) -> bool:
        """Whether some of it has no core of its own."""
        return self.num_threads + self.has_gateway > self.num_cores


def choose_slice_ms(setting: str, load: HostLoad) -> float:
    """The time slice with which prompts are computed, in milliseconds; 0: the kernel's own.

    `setting` is a value of `--prefill-yields`. A worker alone on its host has nobody to yield to.
    """
    others = load.num_threads > 1 or load.has_gateway
    yields = setting == ALWAYS or (setting == AUTO and others and load.shares_cores)
    return YIELDING_SLICE_MS if yields else 0.0


class _SchedAttr(ctypes.Structure):
    """`struct sched_attr` of sched_setattr(2), in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32), ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64), ("deadline_ns", ctypes.c_uint64), ("period_ns", ctypes.c_uint64),
    )  # fmt: skip


def set_slice_ms(slice_ms: float) -> bool:
    """Ask for this time slice for the calling thread; 0: the kernel's own. Returns whether the thread has it now.

    It has not before Linux 6.12, under a real-time policy, or where the call is forbidden.
    """
    numbers = SYSCALLS.get(platform.machine())
    if numbers is None or os.sched_getscheduler(0) not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return False
    wanted_ns, attr = round(slice_ms * 1e6), _read_attr(numbers[1])
    if attr is None:
        return False
    attr.runtime_ns = wanted_ns
    if ctypes.CDLL(None).syscall(numbers[0], 0, ctypes.byref(attr), 0) != 0:
        return False
    found = _read_attr(numbers[1])
    return found is not None and (found.runtime_ns == wanted_ns or not wanted_ns)


def at_usual_slice(open_transport: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """`open_transport` for a thread that a prefill role starts: it, and what a library starts there, inherit the slice
    of the thread that computes prompts, but have to wake promptly.
    """

    def open_promptly(transport: str) -> bytes:
        set_slice_ms(0.0)
        return open_transport(transport)

    return open_promptly


def _read_attr(number: int) -> _SchedAttr | None:
    attr = _SchedAttr(size=ctypes.sizeof(_SchedAttr))
    done = ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attr), attr.size, 0)
    return attr if done == 0 else None
