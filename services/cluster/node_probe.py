"""What a node says of itself before workers are placed on it: versions, and whether it has the model.

`describe_node` is sent to the nodes by value: it must run where another version of Diptych is installed, or none. It
therefore uses nothing of this module or of Diptych, and imports what it needs itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.errors import DiptychError, ModelError, StartError

# Most characters of an error of a node that are shown.
MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The answer of one node. `model_error` is its error about the model in three parts; empty if it has the model.

    `kv_bytes` is the KV pool of each of its workers; 0 if the node was not asked for the model.
    """

    address: str
    versions: Mapping[str, str]
    niceness: int
    # Seconds for which its processes live on without Ray's head, as its environment says; empty: Ray's default.
    reconnect_s: str
    model_error: tuple[str, ...] = ()
    kv_bytes: int = 0


def describe_node(
    question: str, max_workers: int, cpus: float, node_cpus: float, deployment: str, timeout_s: float
) -> dict[str, Any]:
    """Run on a node: its versions, and the answer to `question`, a `ProbeRequest` in JSON without the node's part.

    Its memory is shared by as many workers that take so many `cpus` as it has, and by `max_workers` at most; with 0 it
    is not divided, since bulk workers find out themselves what fits. What workers of the `deployment` (its
    `name_deployment`) hold here is shared too. A model that is not there after `timeout_s` seconds, since it is being
    downloaded, is an error. Without a `question` only versions are told.
    """
    import importlib.metadata
    import json
    import os
    import platform
    import subprocess
    import sys

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    found: dict[str, Any] = {
        "versions": {
            "diptych": version("diptych"),
            "python": platform.python_version(),
            "ray": version("ray"),
        },
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        # Ray spells its settings like this.
        "reconnect_s": os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", ""),  # noqa: SIM112
        "reply": {},
    }
    if not question or found["versions"]["diptych"] == "not installed":
        return found
    # In Ray's steps of 0.0001, in which shares such as 0.1 are whole.
    here = min(max_workers, round(node_cpus * 1e4) // max(1, round(cpus * 1e4))) or max_workers
    # `-P`: nothing may be imported from the directory in which Ray was started.
    try:
        probing = subprocess.run(
            [sys.executable, "-P", "-m", "services.host.model_probe_main"],
            input=json.dumps(json.loads(question) | {"num_workers": here, "deployment": deployment}).encode(),
            capture_output=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        error = {
            "what": f"the model is not there after {timeout_s:.0f} s",
            "why": "a model of the hub may still have to be downloaded",
            "fix": "download it there before (hf download), or wait longer: --start-timeout-s",
        }
        return found | {"reply": {"error": error}}
    try:
        found["reply"] = json.loads(probing.stdout.strip().rsplit(b"\n", 1)[-1])
    except ValueError:
        last = probing.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        found["reply"] = {"error": {"what": "the model cannot be looked for", "why": last[:300]}}
    return found


def name_deployment(namespace: str, address: str) -> str:
    """The name by which workers of a deployment on the node at `address` find each other."""
    return f"{namespace}@{address}"


def parse_report(address: str, answer: Mapping[str, Any]) -> NodeReport:
    """The report in what `describe_node` has returned on the node with this `address`."""
    error, model = answer["reply"].get("error"), answer["reply"].get("model") or {}
    parts = tuple(error.get(name, "") for name in ("what", "why", "fix")) if error else ()
    kv_bytes = model.get("kv_bytes", 0)
    return NodeReport(address, answer["versions"], answer["niceness"], answer["reconnect_s"], parts, kv_bytes)


def check_versions(reports: Sequence[NodeReport], own: Mapping[str, str]) -> None:
    """Check that all nodes have the versions of this process.

    Raises:
        StartError: one has another version of Diptych, Python or Ray, or no Diptych.
    """
    different = [report for report in reports if dict(report.versions) != dict(own)]
    if not different:
        return
    rows = []
    for report in different[:3]:
        parts = [
            f"{name} {report.versions.get(name, '?')}, here {own[name]}"
            for name in own
            if report.versions.get(name) != own[name]
        ]
        rows.append(f"{report.address}: {'; '.join(parts)}")
    if len(different) > len(rows):
        rows[-1] += f"; and {len(different) - len(rows)} more nodes"
    raise StartError(
        "nodes of the Ray cluster have other versions",
        "\n".join(rows),
        "install the same versions on all nodes, and start Ray there from that environment",
    )


def check_models(reports: Sequence[NodeReport], model: str) -> None:
    """Check that all nodes have the model, and memory for it.

    Raises:
        ModelError: one has not; the error names the node, the model and the node's reason.
    """
    lacking = [report for report in reports if report.model_error]
    if not lacking:
        return
    what, why, fix = lacking[0].model_error
    others = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
    raise ModelError(
        f"the node {lacking[0].address}{others} cannot serve the model {model}",
        f"{what}: {why}"[:MAX_REASON] if why else what[:MAX_REASON],
        fix[:MAX_REASON]
        or "copy its folder to the same path there, or keep workers off it (--prefill-resources, --decode-resources)",
    )


def describe_warnings(reports: Sequence[NodeReport], min_reconnect_s: float) -> list[str]:
    """A line about each setting of nodes that makes serving slower or less safe."""
    lines = []
    nice = sorted(report.address for report in reports if report.niceness > 0)
    if nice:
        lines.append(
            f"on {', '.join(nice)} workers run below all other programs: start Ray there with RAY_worker_niceness=0"
        )
    short = sorted(report.address for report in reports if not _lives_on(report.reconnect_s, min_reconnect_s))
    if short:
        lines.append(
            f"on {', '.join(short)} workers end a minute after Ray's head is lost: start Ray there with"
            " RAY_gcs_rpc_server_reconnect_timeout_s=31536000"
        )
    return lines


def node_error(address: str, error: DiptychError) -> DiptychError:
    """The same error, with the name of the node on which it arose."""
    return type(error)(f"on the node {address}: {error.what}", error.why, error.fix)


def _lives_on(reconnect_s: str, min_reconnect_s: float) -> bool:
    try:
        return float(reconnect_s) >= min_reconnect_s
    except ValueError:
        return False
