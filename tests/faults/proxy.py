"""A TCP proxy that knows frames, between any two parts of a deployment; runs in a process of its own.

    with running(folder) as proxy:
        line = proxy.line("decode-0", "127.0.0.1", 4567)           # workers get line.address instead
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


class ProxyRuleHandle:
    """Something that a proxy does. `verify` proves from the counters of both ends that it was done."""

    def __init__(self, line: ProxyLine, number: int, rule: dict[str, Any]) -> None:
        self.line, self.number, self.rule = line, number, rule
        self._healed: dict[str, Any] | None = None

    def evidence(self) -> dict[str, Any]:
        """The evidence up to now, or up to when it was healed; see `proxy_rules.Rule`."""
        return self._healed or self.line.ask("evidence", rule=self.number)

    def done(self) -> bool:
        """Has it been done as often as it was asked for?"""
        evidence = self.evidence()
        return bool(evidence["applied"] >= max(1, evidence["times"]))

    def verify(self) -> dict[str, Any]:
        """The evidence.

        Raises:
            AssertionError: it did not happen, or not as it should.
        """
        evidence = self.evidence()
        assert _was_applied(evidence), f"the fault did not happen: {evidence}"
        return evidence

    def heal(self) -> None:
        """It stands no longer; what it held goes on. The evidence stays."""
        if self._healed is None:
            self._healed = self.line.ask("heal", rule=self.number)


def _was_applied(evidence: dict[str, Any]) -> bool:
    if not evidence["applied"]:
        return False
    match evidence["kind"]:
        case "delay":
            return bool(evidence["least_s"] >= evidence["value"])
        case "drip":
            return bool(evidence["bytes_out"] <= evidence["value"] * (evidence["lasted_s"] + 1.0))
        case "blackhole":
            return bool(evidence["bytes_out"] == 0)
        case "truncate" | "drop":
            return bool(evidence["changed"] and evidence["bytes_out"] < evidence["bytes_in"])
        case "duplicate" | "replay":
            return bool(evidence["changed"] and evidence["bytes_out"] > evidence["bytes_in"])
        case "flip" | "swap":
            return bool(evidence["changed"] and evidence["bytes_out"] == evidence["bytes_in"])
    return True  # reset and half-close count the connections that they were done to


class ProxyLine:
    """An address that stands for another one."""

    def __init__(self, proxy: ProxyClient, name: str, host: str, port: int) -> None:
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

    def _rule(self, kind: str, way: str, **more: Any) -> ProxyRuleHandle:
        rule = {"kind": kind, "way": way, **more}
        return ProxyRuleHandle(self, self.ask("rule", rule=rule)["rule"], rule)

    def delay(self, seconds: float, way: str = "both") -> ProxyRuleHandle:
        """Everything arrives that much later, in order."""
        return self._rule("delay", way, value=seconds)

    def drip(self, bytes_per_s: float, way: str = "both") -> ProxyRuleHandle:
        """No more than that gets through."""
        return self._rule("drip", way, value=bytes_per_s)

    def blackhole(self, way: str = "both") -> ProxyRuleHandle:
        """Nothing gets through and nobody is informed; connections are accepted and lead nowhere. All of it waits."""
        return self._rule("blackhole", way)

    def reset(self) -> ProxyRuleHandle:
        """All connections of the line end with RST, at both ends."""
        return self._rule("reset", "both")

    def half_close(self, way: str = "up") -> ProxyRuleHandle:
        """The receiver learns that nothing more comes; the sender learns nothing."""
        return self._rule("half_close", way)

    def flip(self, way: str, **where: Any) -> ProxyRuleHandle:
        """One bit in the body of a piece. `where`: `on` (kind of piece, "message"), `skip`, `times`, `seed`."""
        return self._rule("flip", way, **where)

    def truncate(self, way: str, **where: Any) -> ProxyRuleHandle:
        """A piece ends early, and the next one follows at once."""
        return self._rule("truncate", way, **where)

    def drop(self, way: str, **where: Any) -> ProxyRuleHandle:
        """A whole piece is missing."""
        return self._rule("drop", way, **where)

    def swap(self, way: str, **where: Any) -> ProxyRuleHandle:
        """Two neighbours change places."""
        return self._rule("swap", way, **where)

    def duplicate(self, way: str, **where: Any) -> ProxyRuleHandle:
        """A piece comes twice."""
        return self._rule("duplicate", way, **where)

    def replay(self, way: str, *, earlier: bool = False, **where: Any) -> ProxyRuleHandle:
        """A message that has passed comes again; with `earlier` one of an earlier connection."""
        return self._rule("replay", way, earlier=earlier, **where)


class ProxyClient:
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

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One command, one answer. Raises AssertionError if the proxy refuses it."""
        with self._lock:
            self._control.sendall(json.dumps(request).encode() + b"\n")
            answer: dict[str, Any] = json.loads(self._answers.readline())
        assert "error" not in answer, (request, answer)
        return answer

    def line(
        self, name: str, host: str, port: int, *, framing: str = "channel", listen: str = "127.0.0.1"
    ) -> ProxyLine:
        """A new port that leads to `host`:`port`. `framing`: what a piece is, of `zmtp.SPLITTERS`."""
        request = {
            "do": "line",
            "name": name,
            "host": host,
            "port": port,
            "framing": framing,
            "listen": listen,
        }
        return ProxyLine(self, name, listen, self.ask(request)["port"])

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
def running_proxy(folder: Path) -> Iterator[ProxyClient]:
    """A proxy; its control socket is in `folder` (short paths only: a Unix socket's has 107 bytes at most)."""
    proxy = ProxyClient(folder)
    try:
        yield proxy
    finally:
        proxy.close()
