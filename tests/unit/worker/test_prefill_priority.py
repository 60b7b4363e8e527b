"""When prompts yield to threads that wake, and how the kernel is asked."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading

import pytest

from services.worker import prefill_priority as module
from services.worker.prefill_priority import (
    ALWAYS,
    AUTO,
    NEVER,
    SYSCALLS,
    YIELDING_SLICE_MS,
    HostLoad,
    at_usual_slice,
    choose_slice_ms,
    set_slice_ms,
)


@pytest.mark.parametrize(
    ("cores", "threads", "gateway", "yields"),
    [
        (2, 2, True, True),  # one of each role and a gateway on two cores
        (3, 2, True, False),  # each has a core of its own
        (3, 4, False, True),
        (4, 4, False, False),
        (1, 1, True, True),
        (1, 1, False, False),  # alone: nobody to yield to
        (64, 8, True, False),
    ],
)
def test_prompts_yield_where_something_has_no_core_of_its_own(
    cores: int, threads: int, gateway: bool, yields: bool
) -> None:
    load = HostLoad(cores, threads, gateway)
    assert choose_slice_ms(AUTO, load) == (YIELDING_SLICE_MS if yields else 0)
    assert choose_slice_ms(ALWAYS, load) == YIELDING_SLICE_MS
    assert choose_slice_ms(NEVER, load) == 0


def read_slice_ms() -> float:
    """The slice that the kernel reports for the calling thread."""
    attr = module._read_attr(SYSCALLS[platform.machine()][1])
    assert attr is not None
    return float(attr.runtime_ns) / 1e6


def needs_kernel() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(set_slice_ms(YIELDING_SLICE_MS)))
    thread.start()
    thread.join()
    if not found[0]:
        pytest.skip("this kernel gives threads no time slices of their own")


def test_a_slice_is_that_of_one_thread_and_can_be_given_back() -> None:
    needs_kernel()
    seen: list[float] = []

    def prefill_then_decode() -> None:
        usual = read_slice_ms()
        assert set_slice_ms(YIELDING_SLICE_MS)
        seen.append(read_slice_ms())
        assert set_slice_ms(0.0)
        seen.append(read_slice_ms() - usual)

    before, level = read_slice_ms(), os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=prefill_then_decode)
    thread.start()
    thread.join()
    assert seen == [YIELDING_SLICE_MS, 0]
    assert (read_slice_ms(), os.getpriority(os.PRIO_PROCESS, 0)) == (before, level)


def test_what_opens_a_transport_does_not_keep_the_slice_of_prompts() -> None:
    needs_kernel()
    seen: list[float] = []

    def open_transport(transport: str) -> bytes:
        seen.append(read_slice_ms())
        return transport.encode()

    def compute_prompts() -> None:
        usual = read_slice_ms()
        assert set_slice_ms(YIELDING_SLICE_MS)
        inner = threading.Thread(target=lambda: at_usual_slice(open_transport)("nixl"))
        inner.start()
        inner.join()
        seen.extend([usual, read_slice_ms()])

    thread = threading.Thread(target=compute_prompts)
    thread.start()
    thread.join()
    within, usual, outside = seen
    assert within == usual != outside == YIELDING_SLICE_MS


def test_no_privilege_is_needed_at_any_nice_level() -> None:
    needs_kernel()
    if os.geteuid():
        pytest.skip("the test process has no privileges to give up")
    program = """
import os
from services.worker.prefill_priority import set_slice_ms
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
os.nice(3)
level = os.nice(0)
print(set_slice_ms(10.0), set_slice_ms(0.0), os.nice(0) == level)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True"] * 3, done.stderr


def test_where_the_kernel_gives_none_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not set_slice_ms(YIELDING_SLICE_MS)
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_FIFO)
    assert not set_slice_ms(YIELDING_SLICE_MS)
    monkeypatch.undo()
    monkeypatch.setitem(SYSCALLS, platform.machine(), (-1, -1))
    assert not set_slice_ms(YIELDING_SLICE_MS), "as where a sandbox forbids the call"
