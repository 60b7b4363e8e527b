"""Starts a Ray head with only the two processes that place and watch actors: gcs_server and raylet.

`ray.init` has no option for it (ray-project/ray#46732), so parts of Ray are replaced during the call:

    monitor, log monitor, dashboard   are not started: Ray adds no nodes here, and logs stay in files
    the raylet's two agents           are replaced by `services.cluster.local_ray.agent`, since a raylet waits for them

The processes left out make up more than half of the CPU time of a head's start, and most of its use at rest. The
replaced parts are private to Ray, so any other version of Ray than the tested one starts its ordinary head.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray._private.node
import ray._private.services
import ray._private.utils

TESTED_VERSION = (2, 60)
REGISTERED_TIMEOUT_S, REGISTERED_POLL_S = 20.0, 0.02
AGENT = Path(__file__).with_name("agent.py")
# Option of the raylet -> the ports that the raylet waits for, in the form of `services.cluster.local_ray.agent`'s
# arguments.
AGENTS = {
    "--dashboard_agent_command": (
        "metrics_agent_port=-1",
        "metrics_export_port=-1",
        "dashboard_agent_listen_port=-1",
    ),
    "--runtime_env_agent_command": ("runtime_env_agent_port=0",),
}


class LeanNode(ray._private.node.Node):
    """Ray's head node without the processes that Diptych does not use."""

    def __init__(self, ray_params: Any, *positional: Any, **named: Any) -> None:
        ray_params.no_monitor = True
        ray_params.include_log_monitor = False
        super().__init__(ray_params, *positional, **named)

    def start_api_server(self, **_: Any) -> None:
        """Start no dashboard: Ray then expects an empty address."""
        self._webui_url = ""

    def start_raylet(self, *positional: Any, **named: Any) -> None:
        """Start the raylet with the replaced agents, and wait until it has registered."""
        # Path of the files with the agents' ports.
        prefix = f"{self._session_dir}/*_{self._node_id}"
        start = partial(_start_raylet, ray._private.services.start_ray_process, prefix)
        with (
            _replaced_attribute(ray._private.services, "start_ray_process", start),
            # The original function imports everything that the dashboard needs, which takes 0.5 s of CPU.
            _replaced_attribute(ray._private.utils, "get_dashboard_dependency_error", _no_dashboard),
        ):
            super().start_raylet(*positional, **named)
        self._await_raylet()

    def _await_raylet(self) -> None:
        """Return when the raylet has registered, checking every 20 ms; Ray itself would check once a second.

        After the timeout Ray's own check reports the problem.
        """
        client: Any = self.get_gcs_client()  # type: ignore[no-untyped-call]
        deadline_s = time.monotonic() + REGISTERED_TIMEOUT_S
        while time.monotonic() < deadline_s and not client.get_all_node_info(timeout=REGISTERED_TIMEOUT_S):
            time.sleep(REGISTERED_POLL_S)


def _no_dashboard() -> ImportError:
    """The answer for Ray's question why there is no dashboard."""
    return ImportError("not looked for")


def _start_raylet(
    start_process: Any, prefix: str, command: Sequence[str], *positional: Any, **named: Any
) -> Any:
    """Start the raylet with its agent commands replaced."""
    return start_process([_with_agent(word, prefix) for word in command], *positional, **named)


def _with_agent(word: str, prefix: str) -> str:
    """One word of the raylet's command line; an option with an agent's command gets the replacement's command."""
    option = word.partition("=")[0]
    if option not in AGENTS:
        return word
    agent = [sys.executable, "-I", "-S", str(AGENT), prefix, *AGENTS[option]]
    return f"{option}={subprocess.list2cmdline(agent)}"


@contextlib.contextmanager
def lean_head() -> Iterator[None]:
    """In this context `ray.init` starts a lean head, provided that Ray is of the tested version."""
    if tuple(ray.__version__.split(".")[:2]) != tuple(map(str, TESTED_VERSION)):
        yield
        return
    with _replaced_attribute(ray._private.node, "Node", LeanNode):
        yield


@contextlib.contextmanager
def _replaced_attribute(module: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a module while the context lasts."""
    kept = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, kept)
