"""Faults, and the proof that they happened. A fault that cannot prove itself fails the run: nothing was tested.

strike() ──▶ the fault lasts ──▶ heal() ──▶ verify() -> what was seen of it
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from tests.faults import proxy
from tests.faults.fault_deployment import PATIENCE_S, FaultDeployment
from tests.faults.proxy import ProxyLine
from tests.support.waiting import comes_true


class FaultUnproven(AssertionError):
    """The fault that was injected did not happen."""


class InjectedFault(Protocol):
    """Something that happens to `target`, a part's name or several joined by "+"."""

    target: str

    def strike(self) -> None: ...

    def heal(self) -> None: ...

    def verify(self) -> str:
        """What was seen of the fault. Raises Unproven."""


def process_state(pid: int) -> str:
    """The letter of a process's state ("T" is stopped); "" if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def holds_in_time(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Whether `condition` came true in time."""
    return comes_true(condition, timeout_s, 0.01) is not None


class KillFault:
    """SIGKILL. Its supervisor starts another process; `heal` waits until that one serves."""

    def __init__(self, fleet: FaultDeployment, target: str) -> None:
        self.fleet, self.target = fleet, target
        self._pid = 0
        self._gone = False

    def strike(self) -> None:
        self._pid = self.fleet.pid(self.target)
        assert self._pid, f"{self.target} does not run"
        os.kill(self._pid, signal.SIGKILL)

    def heal(self) -> None:
        part = self.fleet.parts[self.target]
        self._gone = holds_in_time(lambda: part.status().pid not in (0, self._pid))
        self.fleet.until_ready(part)

    def verify(self) -> str:
        ended = self.fleet.parts[self.target].status().ended
        if not self._gone or process_state(self._pid) not in ("", "Z") or "SIGKILL" not in ended:
            raise FaultUnproven(
                f"{self.target} was not killed: {ended!r}, process {self._pid} is {process_state(self._pid)!r}"
            )
        return f"process {self.target} {ended}, another one serves"


class StopFault:
    """SIGSTOP until it is healed: sockets stay open, nothing answers."""

    def __init__(self, fleet: FaultDeployment, target: str) -> None:
        self.fleet, self.target = fleet, target
        self._pid = 0
        self._states = ["", ""]

    def strike(self) -> None:
        self._pid = self.fleet.pid(self.target)
        assert self._pid, f"{self.target} does not run"
        os.kill(self._pid, signal.SIGSTOP)
        holds_in_time(lambda: process_state(self._pid) == "T", 5.0)
        self._states[0] = process_state(self._pid)

    def heal(self) -> None:
        self._states[1] = process_state(self._pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)
        holds_in_time(lambda: process_state(self._pid) != "T", 5.0)

    def verify(self) -> str:
        if self._states != ["T", "T"]:
            raise FaultUnproven(f"{self.target} was not stopped all the time: states {self._states}")
        return f"process {self.target} in state T from the first to the last moment"


class ProxyFault:
    """What a proxy does to the connections between the gateway and workers: all of `target`'s, or all there are.

    `kind` is "partition" (nothing passes, silently), "slow" (so few bytes a second) or "cut" (RST at both ends).
    """

    def __init__(
        self, lines: Mapping[str, ProxyLine], target: str, kind: str, bytes_per_s: float = 8000.0
    ) -> None:
        self.target, self.kind, self._bytes_per_s = target, kind, bytes_per_s
        self._lines = list(lines.values()) if target == "gateway" else [lines[target]]
        self._faults: list[proxy.ProxyRuleHandle] = []

    def strike(self) -> None:
        for line in self._lines:
            match self.kind:
                case "partition":
                    self._faults.append(line.blackhole())
                case "slow":
                    self._faults += [line.drip(self._bytes_per_s, way) for way in ("up", "down")]
                case _:
                    self._faults.append(line.reset())

    def heal(self) -> None:
        for fault in self._faults:
            fault.heal()

    def verify(self) -> str:
        try:
            seen = [fault.verify() for fault in self._faults]
        except AssertionError as error:
            raise FaultUnproven(f"{self.kind} of {self.target}: {error}") from error
        kept, passed = sum(one["bytes_in"] for one in seen), sum(one["bytes_out"] for one in seen)
        match self.kind:
            case "cut":
                return f"{len(self._lines)} lines of {self.target} reset at both ends"
            case "slow":
                return (
                    f"{len(self._lines)} lines of {self.target}: {passed} bytes passed, as few as they should"
                )
        return f"{len(self._lines)} lines of {self.target}: {kept} bytes came, {passed} passed meanwhile"


def make_fault(
    fleet: FaultDeployment, lines: Mapping[str, ProxyLine], kind: str, target: str
) -> InjectedFault:
    """The fault of that name, not yet struck."""
    match kind:
        case "kill":
            return KillFault(fleet, target)
        case "stop":
            return StopFault(fleet, target)
        case "partition" | "slow" | "cut":
            return ProxyFault(lines, target, kind)
    raise ValueError(f"there is no fault {kind!r}")
