"""A real Prometheus that scrapes one deployment with the committed rules, for as long as a block lasts."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from services.dashboard.rules import OBJECTIVES, rule_file
from services.host.ports import claim_port
from services.host.supervision.process_guard import tied_command

JOB = "diptych"
START_S, STOP_S = 60.0, 30.0


def is_installed() -> bool:
    """Whether this machine has a `prometheus` program."""
    return shutil.which("prometheus") is not None


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """A running Prometheus. All methods raise httpx.HTTPError if it does not answer, or refuses the query."""

    http: httpx.Client

    def query(self, expr: str, at_s: float | None = None) -> list[dict[str, Any]]:
        """The series of an instant query, now or at a Unix time, each with `metric` and `value`."""
        asked = {"query": expr} | ({} if at_s is None else {"time": f"{at_s:.3f}"})
        found: list[dict[str, Any]] = self._get("/api/v1/query", asked)["result"]
        return found

    def query_range(self, expr: str, since_s: float, until_s: float, step_s: float) -> list[dict[str, Any]]:
        """The series of a query between two Unix times, each with `metric` and `values`."""
        asked = {
            "query": expr, "start": f"{since_s:.3f}", "end": f"{until_s:.3f}", "step": f"{step_s:g}",
        }  # fmt: skip
        found: list[dict[str, Any]] = self._get("/api/v1/query_range", asked)["result"]
        return found

    def value(self, expr: str) -> float | None:
        """The value of the first series of an instant query; None if there is none."""
        found = self.query(expr)
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="firing"}')}

    def metric_names(self) -> set[str]:
        """The names of all series that were ever stored."""
        return set(self._get("/api/v1/label/__name__/values", {}))

    def _get(self, path: str, asked: dict[str, str]) -> Any:
        return self.http.get(path, params=asked).raise_for_status().json()["data"]


@contextlib.contextmanager
def scraping(
    target: str,
    *,
    interval: str = "1s",
    evaluation: str | None = None,
    objectives: tuple[str, ...] = OBJECTIVES,
    slo_target: float = 0.9,
) -> Iterator[PrometheusServer]:
    """A Prometheus that scrapes `target` (`HOST:PORT`) every `interval`, until the block ends.

    The rules are those that `diptych dashboards` writes for `slo_target`; `evaluation` replaces how often they are
    evaluated, and neither thresholds nor waits.

    Raises:
        RuntimeError: it does not start.
    """  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="diptych-prometheus-") as name:
        folder = Path(name)
        rules = rule_file(slo_target, objectives)
        for group in rules["groups"]:
            group["interval"] = evaluation or group["interval"]
        (folder / "rules.yml").write_text(yaml.safe_dump(rules))
        settings = {
            "global": {"scrape_interval": interval, "evaluation_interval": evaluation or "30s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {"job_name": JOB, "static_configs": [{"targets": [target]}], "scrape_timeout": interval}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        address = f"127.0.0.1:{claim_port('127.0.0.1', 0)}"
        command = [
            shutil.which("prometheus") or "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=warn",
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(tied_command(command), stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False) as http:
                _await_ready(http, process, folder / "log")
                yield PrometheusServer(http)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_ready(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Raises RuntimeError if it ended, or is not ready in time."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if http.get("/-/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"prometheus does not start: {log.read_text(errors='replace')[-600:]}")
