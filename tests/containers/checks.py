"""What is checked of the image and of compose, in order; each check returns its figure, and fails by raising."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tests.containers import image_build
from tests.containers.project import ALERTMANAGER, PROMETHEUS, SLOS, URL, Project, Stream

T = TypeVar("T")
STREAM_TOKENS, NUM_STREAMS, PROBE_TOKENS, MAX_TOKENS = 400, 12, 60, 1500
DRAIN_TARGET_S = 15.0  # longer than the 10 s that a part drains by default, shorter than compose's 30 s
BATCH_LINES = 20
RULES_S, ALERT_S = 300.0, 240.0
ALERT = "DiptychPoolDead"


class Checks:
    """The checks, and what later ones need of earlier ones."""

    def __init__(self, project: Project) -> None:
        self.project, self.engine = project, project.engine
        self._text = ""
        self._batch: dict[str, Any] = {}
        self._result = ""
        self._rules: list[dict[str, Any]] = []

    def of_image(self) -> list[tuple[str, Callable[[], str]]]:
        """Without these there is nothing to try."""
        return [
            ("the documented build, offline, from a folder of wheels", self.build_image),
            ("`up -d --wait --build` without an image: one build, nothing dangling", self.first_up),
        ]

    def of_project(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("no key in any environment or command line", self.find_no_keys),
            ("chat: streamed, with the key; without it 401", self.chat),
            ("the admin key opens `/status`, the API key does not", self.open_status),
            ("KV between containers goes through shared memory", self.read_transport),
            ("a worker killed while a stream runs: the same text", self.kill_worker),
            ("`stop gateway` beside long streams: all of them end whole", self.stop_gateway),
            ("a batch, in the volume of the gateway", self.run_batch),
            ("`down` and `up`: the batch, its results and the keys are there", self.keep_batch),
            ("monitoring: targets are up, rules load", self.start_monitoring),
            ("monitoring: with SLOs all recording rules have data", self.record_rules),
            (f"monitoring: `{ALERT}` reaches Alertmanager once a pool is gone", self.raise_alert),
            ("`down --volumes` leaves no volume", self.remove_all),
            ("a build from an index with a certificate authority of its own", self.build_from_index),
        ]

    def build_image(self) -> str:
        return image_build.build_documented(self.engine)

    def first_up(self) -> str:
        image_build.forget_image(self.engine)
        with image_build.offline_compose(self.engine) as files:
            took_s = self.project.up("--build", files=files)
        dangling = self.engine.run("docker", "images", "-q", "-f", "dangling=true").split()
        assert not dangling, f"{len(dangling)} images without a name"
        assert len(self.engine.run("docker", "images", "-q", "diptych").split()) == 1
        return f"{took_s:.0f} s, with the cached build and compiled kernels"

    def find_no_keys(self) -> str:
        names = self.engine.run("docker", "ps", "-aq").split()
        shown = self.engine.run("docker", "inspect", *names)
        for name in names:
            if self.engine.succeeds("docker", "top", name):
                shown += self.engine.run("docker", "top", name, "-eo", "pid,args")
        assert len(self.project.keys) == 3
        found = [name for name, key in self.project.keys.items() if key in shown]
        assert not found, f"the {found[0]} key is shown"
        return f"{len(names)} containers, {len(self.project.keys)} keys"

    def chat(self) -> str:
        refused = self.project.ask("GET", "/v1/models", key=None).status_code
        assert refused == 401, refused
        stream = self.project.chat(STREAM_TOKENS)
        assert stream.finish == "length" and not stream.error, stream.error
        self._text = stream.text
        return f"{len(stream.times_s)} parts in {stream.times_s[-1] - stream.times_s[0]:.1f} s"

    def open_status(self) -> str:
        found = {name: self.project.ask("GET", "/status", key=name).status_code for name in ("admin", "api")}
        assert found == {"admin": 200, "api": 401}, found
        return f"{found['admin']}, {found['api']}"

    def read_transport(self) -> str:
        lines = self.project.ask("GET", "/metrics", key="metrics").text.splitlines()
        moved = [line for line in lines if line.startswith("diptych:transfer_bytes_total{")]
        assert moved and all('transport="shm"' in line for line in moved), moved
        return f"{sum(float(line.split()[-1]) for line in moved) / 1e6:.1f} MB"

    def kill_worker(self) -> str:
        stream = Stream()
        for _ in self.project.follow_chat(stream, STREAM_TOKENS):
            if len(stream.times_s) == STREAM_TOKENS // 8:
                os.kill(self.project.find_worker("decode"), signal.SIGKILL)
        assert not stream.error, stream.error
        assert stream.text == self._text, "another text than undisturbed"
        self._wait_ready()
        return f"longest gap {stream.max_gap_s:.1f} s"

    def stop_gateway(self) -> str:
        """Streams that last for longer than the default drain: as many tokens as take DRAIN_TARGET_S here."""
        began_s = time.monotonic()
        self._run_streams(PROBE_TOKENS)
        tokens = min(MAX_TOKENS, round(PROBE_TOKENS * DRAIN_TARGET_S / (time.monotonic() - began_s)))
        stopping: list[float] = []

        def stop() -> None:
            began_s = time.monotonic()
            self.project.compose("stop", "gateway")
            stopping.append(time.monotonic() - began_s)

        stopper = threading.Thread(target=stop)
        streams = self._run_streams(tokens, stopper.start)
        stopper.join()
        whole = sum(stream.finish == "length" for stream in streams)
        errors = sorted({stream.error for stream in streams if stream.error})
        assert whole == len(streams), f"{whole} of {len(streams)}: {errors[:1]}"
        self.project.up()
        return f"{whole} of {len(streams)} streams of {tokens} tokens; stopped after {stopping[0]:.0f} s"

    def _run_streams(self, tokens: int, then: Callable[[], None] = lambda: None) -> list[Stream]:
        """Streams side by side; `then` is called once each has begun."""
        begun = threading.Barrier(NUM_STREAMS, action=then)

        def run(number: int) -> Stream:
            stream = Stream()
            parts = self.project.follow_chat(stream, tokens, f"Tell me story {number}.")
            next(parts, None)
            begun.wait(120)
            for _ in parts:
                pass
            return stream

        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            return list(pool.map(run, range(NUM_STREAMS)))

    def run_batch(self) -> str:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "A list."}],
            "max_tokens": 20,
            "temperature": 0,
        }
        order = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        lines = [json.dumps({"custom_id": str(number), **order}) for number in range(BATCH_LINES)]
        upload = {"file": ("lines.jsonl", "\n".join(lines).encode())}
        file = self.project.ask("POST", "/v1/files", files=upload, data={"purpose": "batch"})
        assert file.status_code == 200, file.text
        order = {
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        answer = self.project.ask("POST", "/v1/batches", json=order)
        assert answer.status_code == 200, answer.text
        began_s = time.monotonic()
        self._batch = self._wait(lambda: self._ended_batch(answer.json()["id"]), 300.0)
        counts = self._batch["request_counts"]
        assert (self._batch["status"], counts["completed"]) == ("completed", BATCH_LINES), self._batch
        self._result = self._read_result()
        return f"{counts['completed']} of {counts['total']} lines in {time.monotonic() - began_s:.1f} s"

    def _ended_batch(self, name: str) -> dict[str, Any] | None:
        batch: dict[str, Any] = self.project.ask("GET", f"/v1/batches/{name}").json()
        return None if batch["status"] in ("validating", "in_progress", "finalizing") else batch

    def _read_result(self) -> str:
        answer = self.project.ask("GET", f"/v1/files/{self._batch['output_file_id']}/content")
        assert answer.status_code == 200 and len(answer.text.splitlines()) == BATCH_LINES, answer.text[:200]
        return answer.text

    def keep_batch(self) -> str:
        keys = self.project.keys
        self.project.compose("down")
        took_s = self.project.up()
        assert self.project.keys == keys, "other keys"
        batch = self.project.ask("GET", f"/v1/batches/{self._batch['id']}").json()
        assert batch == self._batch and self._read_result() == self._result, batch
        return f"ready again after {took_s:.0f} s"

    def start_monitoring(self) -> str:
        self.engine.build_stand_ins()
        self.project.names |= SLOS
        self.project.up("gateway", "prefill", "decode", "prometheus", "alertmanager", profile="monitoring")

        def targets_up() -> list[Any] | None:
            targets = self._ask_monitor(PROMETHEUS, "/api/v1/targets")["data"]["activeTargets"]
            return targets if targets and all(one["health"] == "up" for one in targets) else None

        targets = self._wait(targets_up, 120.0)
        groups = self._ask_monitor(PROMETHEUS, "/api/v1/rules")["data"]["groups"]
        self._rules = [rule for group in groups for rule in group["rules"]]
        broken = [rule["name"] for rule in self._rules if rule["health"] == "err"]
        assert self._rules and not broken, broken
        return f"{len(targets)} target, {len(self._rules)} rules"

    def record_rules(self) -> str:
        names = sorted({rule["name"] for rule in self._rules if rule["type"] == "recording"})
        found: set[str] = set()

        def all_recorded() -> bool | None:
            self.project.chat(PROBE_TOKENS)
            for name in set(names) - found:
                if self._ask_monitor(PROMETHEUS, "/api/v1/query", query=name)["data"]["result"]:
                    found.add(name)
            return True if len(found) == len(names) else None

        began_s = time.monotonic()
        try:
            self._wait(all_recorded, RULES_S)
        except TimeoutError:
            raise AssertionError(
                f"{len(found)} of {len(names)}; none: {sorted(set(names) - found)[0]}"
            ) from None
        return f"{len(found)} of {len(names)} after {time.monotonic() - began_s:.0f} s"

    def raise_alert(self) -> str:
        began_s = time.monotonic()
        self.project.compose("stop", "decode")

        def raised() -> bool | None:
            alerts = self._ask_monitor(ALERTMANAGER, "/api/v2/alerts")
            return True if any(one["labels"]["alertname"] == ALERT for one in alerts) else None

        self._wait(raised, ALERT_S)
        return f"{time.monotonic() - began_s:.0f} s after `stop decode`"

    def remove_all(self) -> str:
        self.project.compose("--profile", "monitoring", "down", "--volumes")
        left = self.engine.run("docker", "volume", "ls", "-q").split()
        assert not [name for name in left if name.startswith("diptych_")], left
        return "none"

    def build_from_index(self) -> str:
        return image_build.build_from_index(self.engine)

    def _ask_monitor(self, base: str, path: str, **params: str) -> Any:
        return self.project.ask("GET", path, key=None, base=base, params=params).json()

    def _wait_ready(self) -> None:
        def ready() -> bool | None:
            return True if self.project.ask("GET", "/ready", base=URL).status_code == 200 else None

        self._wait(ready, 300.0)

    def _wait(self, find: Callable[[], T | None], limit_s: float) -> T:
        """What `find` returns once it is not None. Raises TimeoutError."""
        end_s = time.monotonic() + limit_s
        while (found := find()) is None:
            if time.monotonic() > end_s:
                raise TimeoutError(f"not within {limit_s:.0f} s")
            time.sleep(0.5)
        return found
