"""A TCP proxy that knows frames, between any two parts of a deployment; runs in a process of its own.

    with running(folder) as proxy:
        line = proxy.line("decode-0", "127.0.0.1", 4567)           # workers are told line.address instead
        fault = line.blackhole()
        ...
        fault.verify()                                             # raises unless it really happened
        fault.heal()

Ways: "up" is what the one who connects sends, "down" what comes back, "both". Everything is synchronous.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Fault:
    """Something that a proxy does. `verify` proves from the counters of both ends that it was done."""

    def __init__(self, line: Line, number: int, rule: dict[str, Any]) -> None:
        self.line, self.number, self.rule = line, number, rule
        self._healed: dict[str, Any] | None = None

    def told(self) -> dict[str, Any]:
        """The evidence up to now, or up to when it was healed; see `proxy_rules.Rule`."""
        return self._healed or self.line.ask("told", rule=self.number)

    def done(self) -> bool:
        """Has it been done as often as it was asked for?"""
        told = self.told()
        return bool(told["applied"] >= max(1, told["times"]))

    def verify(self) -> dict[str, Any]:
        """The evidence.

        Raises:
            AssertionError: it did not happen, or not as it should.
        """
        told = self.told()
        assert _happened(told), f"the fault did not happen: {told}"
        return told

    def heal(self) -> None:
        """It stands no longer; what it held goes on. The evidence stays."""
        if self._healed is None:
            self._healed = self.line.ask("heal", rule=self.number)


def _happened(told: dict[str, Any]) -> bool:
    if not told["applied"]:
        return False
    match told["kind"]:
        case "delay":
            return bool(told["least_s"] >= told["value"])
        case "drip":
            return bool(told["bytes_out"] <= told["value"] * (told["lasted_s"] + 1.0))
        case "blackhole":
            return bool(told["bytes_out"] == 0)
        case "truncate" | "drop":
            return bool(told["changed"] and told["bytes_out"] < told["bytes_in"])
        case "duplicate" | "replay":
            return bool(told["changed"] and told["bytes_out"] > told["bytes_in"])
        case "flip" | "swap":
            return bool(told["changed"] and told["bytes_out"] == told["bytes_in"])
    return True  # reset and half-close count the connections that they were done to


class Line:
    """An address that stands for another one."""

    def __init__(self, proxy: Proxy, name: str, host: str, port: int) -> None:
        self._proxy, self.name, self.host, self.port = proxy, name, host, port

    @property
    def address(self) -> str:
        """As ZeroMQ wants it."""
        return f"tcp://{self.host}:{self.port}"

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        return self._proxy.ask({"do": do, "line": self.name, **more})

    def counters(self) -> dict[str, Any]:
        """Connections accepted, refused, open; for "up" and "down" bytes, pieces and messages, `_in` and `_out`."""
        return self.ask("counters")

    def _rule(self, kind: str, way: str, **more: Any) -> Fault:
        rule = {"kind": kind, "way": way, **more}
        return Fault(self, self.ask("rule", rule=rule)["rule"], rule)

    def delay(self, seconds: float, way: str = "both") -> Fault:
        """Everything arrives that much later, in order."""
        return self._rule("delay", way, value=seconds)

    def drip(self, bytes_per_s: float, way: str = "both") -> Fault:
        """No more than that gets through."""
        return self._rule("drip", way, value=bytes_per_s)

    def blackhole(self, way: str = "both") -> Fault:
        """Nothing gets through and nobody is told; connections are accepted and lead nowhere. All of it waits."""
        return self._rule("blackhole", way)

    def reset(self) -> Fault:
        """All connections of the line end with RST, at both ends."""
        return self._rule("reset", "both")

    def half_close(self, way: str = "up") -> Fault:
        """The receiver is told that nothing more comes; the sender is told nothing."""
        return self._rule("half_close", way)

    def flip(self, way: str, **where: Any) -> Fault:
        """One bit in the body of a piece. `where`: `on` (kind of piece, "message"), `skip`, `times`, `seed`."""
        return self._rule("flip", way, **where)

    def truncate(self, way: str, **where: Any) -> Fault:
        """A piece ends early, and the next one follows at once."""
        return self._rule("truncate", way, **where)

    def drop(self, way: str, **where: Any) -> Fault:
        """A whole piece is missing."""
        return self._rule("drop", way, **where)

    def swap(self, way: str, **where: Any) -> Fault:
        """Two neighbours change places."""
        return self._rule("swap", way, **where)

    def duplicate(self, way: str, **where: Any) -> Fault:
        """A piece comes twice."""
        return self._rule("duplicate", way, **where)

    def replay(self, way: str, *, earlier: bool = False, **where: Any) -> Fault:
        """A message that has passed comes again; with `earlier` one of an earlier connection."""
        return self._rule("replay", way, earlier=earlier, **where)


class Proxy:
    """The proxy's process, from outside. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        path = folder / "proxy"
        self._lock = threading.Lock()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(str(path))
            door.listen(1)
            command = [sys.executable, "-m", "tests.faults.proxy_server", str(path)]
            self.process = subprocess.Popen(command, cwd=ROOT)
            door.settimeout(120.0)
            self._control, _ = door.accept()
        path.unlink()
        self._control.settimeout(120.0)
        self._answers = self._control.makefile("r", encoding="utf-8")

    def ask(self, told: dict[str, Any]) -> dict[str, Any]:
        """One command, one answer. Raises AssertionError if the proxy refuses it."""
        with self._lock:
            self._control.sendall(json.dumps(told).encode() + b"\n")
            answer: dict[str, Any] = json.loads(self._answers.readline())
        assert "error" not in answer, (told, answer)
        return answer

    def line(
        self, name: str, host: str, port: int, *, framing: str = "channel", listen: str = "127.0.0.1"
    ) -> Line:
        """A new port that leads to `host`:`port`. `framing`: what a piece is, of `zmtp.SPLITTERS`."""
        told = {"do": "line", "name": name, "host": host, "port": port, "framing": framing, "listen": listen}
        return Line(self, name, listen, self.ask(told)["port"])

    def close(self) -> None:
        """End the process, and every connection through it."""
        self._answers.close()
        self._control.close()
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def running(folder: Path) -> Iterator[Proxy]:
    """A proxy; its control socket is in `folder` (short paths only: a Unix socket's has 107 bytes at most)."""
    proxy = Proxy(folder)
    try:
        yield proxy
    finally:
        proxy.close()
