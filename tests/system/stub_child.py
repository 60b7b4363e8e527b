"""A child that speaks as workers and the gateway do while they start; what it does is in its specification's model.

Run as `python -m tests.system.stub_child` with a `WorkerSpec` or `GatewaySpec` on standard input.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

READY, CRASH, REFUSE, SILENT, HANG = "ready", "crash", "refuse", "silent", "hang"


def tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


class Page(BaseHTTPRequestHandler):
    """A gateway that is always ready."""

    def do_GET(self) -> None:
        links = [{"source": "p", "target": "d", "transport": "shm", "gb_per_s": 4.0, "latency_us": 9.0}]
        body = json.dumps({"ready": True, "reasons": [], "workers": [], "links": links}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    spec = json.loads(sys.stdin.buffer.readline())
    print("a library's banner")
    does = str(spec["model"]).rsplit("/", 1)[-1]
    tell({"phase": "load", "done": 1, "total": 2})
    if "num_decode" in spec:
        does = READY  # the workers fail, the gateway does not
    if does == CRASH:
        tell({"error": {"what": "the worker failed", "why": "ZeroDivisionError", "fix": "it is restarted"}})
        return 1
    if does == REFUSE:
        tell(
            {
                "error": {
                    "what": "the model does not fit",
                    "why": "needs 9 GiB\nhas 1 GiB",
                    "fix": "a smaller one",
                }
            }
        )
        return 3
    if does == SILENT:
        print("Segmentation fault in the tests", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    if does == HANG:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell({"phase": "warm", "done": 1, "total": 1})
    tell({"phase": "ready", "done": 1, "total": 1})
    if "num_decode" in spec:
        HTTPServer((spec["host"], spec["port"]), Page).serve_forever()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    sys.exit(main())
