"""Runs `diptych serve` on the head's node of a Ray cluster of namespaces, and asks its gateway."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from services.cli.serve.signals import SAME_PRESS_S
from services.host.supervision.process_guard import tied_command
from tests.support import waiting
from tests.support.ray_nodes import RayCluster

PATIENCE_S = 300.0
PORT = 8000
SERVE = [sys.executable, "-P", "-m", "services.cli.main", "serve"]


def run_serve(
    cluster: RayCluster, address: str, *arguments: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """`diptych serve --ray-address ADDRESS` to its end; an empty variable is left out."""
    given = {name: value for name, value in (cluster.environ | environ).items() if value}
    command = cluster.nodes[0].command([*SERVE, "--ray-address", address, *arguments])
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=PATIENCE_S)


class Driver:
    """One `diptych serve` in the cluster, ready when the block begins; its gateway listens on the bridge's network."""

    def __init__(
        self, cluster: RayCluster, *arguments: str, namespace: str = "diptych", port: int = PORT
    ) -> None:
        self.cluster, self.port = cluster, port
        self.host = cluster.nodes[0].house.address
        self._log = cluster.folder / f"serve-{namespace}-{time.monotonic_ns()}.log"
        words = [*SERVE, "--ray-address", cluster.address, "--ray-namespace", namespace, "--insecure"]
        words += ["--host", self.host, "--port", str(port), *arguments]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                tied_command([_find_ip(), *cluster.nodes[0].command(words)[1:]]),
                env=cluster.environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Driver:
        try:
            waiting.wait_for(self._is_up, PATIENCE_S, explain=self.output)
            waiting.wait_for(self._is_linked, PATIENCE_S, 0.5, explain=self.output)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()

    def output(self) -> str:
        """What it has said so far."""
        return self._log.read_text(errors="replace")

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.output()
        return "stop with Ctrl-C" in self.output()

    def _is_linked(self) -> bool:
        state = self.status()
        roles = [one["role"] for one in state["workers"]]
        return len(state["links"]) == roles.count("prefill") * roles.count("decode") and not state["reasons"]

    def status(self) -> dict[str, Any]:
        """`GET /status`."""
        return dict(self.request("GET", "/status"))

    def request(self, verb: str, path: str, body: Any = None) -> Any:
        """The answer of the gateway, as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        try:
            connection.request(
                verb,
                path,
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == 200, (answer.status, content[:500])
            return json.loads(content)
        finally:
            connection.close()

    def serve_process(self) -> psutil.Process:
        """The process of `diptych serve` itself, which its guard has forked."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        serving = [one for one in family if "services.cli.main" in one.cmdline()]
        return max(serving, key=lambda one: one.create_time())

    def kill(self) -> None:
        """Kill `diptych serve`; its gateway ends with it, and its workers go on."""
        self.serve_process().kill()
        self.process.wait(PATIENCE_S)

    def interrupt_twice(self) -> int:
        """Press Ctrl-C, and again while it stops; returns the exit status."""
        serving = self.serve_process()
        serving.send_signal(signal.SIGINT)
        waiting.wait_for(lambda: "stopping" in self.output(), PATIENCE_S, explain=self.output)
        time.sleep(1.5 * SAME_PRESS_S)
        serving.send_signal(signal.SIGINT)
        return self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        """End it in order, with its workers."""
        if self.process.poll() is None:
            for one in psutil.Process(self.process.pid).children(recursive=True):
                if "services.cli.main" in one.cmdline():
                    one.send_signal(signal.SIGTERM)
                    break
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _find_ip() -> str:
    """The path of the command `ip`: a tied command begins with a path."""
    return next(
        path for path in ("/usr/sbin/ip", "/sbin/ip", "/usr/bin/ip", "/bin/ip") if Path(path).exists()
    )


def ask(driver: Driver, prompt: str, tokens: int) -> str:
    """The greedy answer to a prompt."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return str(driver.request("POST", "/v1/completions", body)["choices"][0]["text"])
