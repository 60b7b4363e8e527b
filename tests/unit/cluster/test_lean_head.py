"""Of which processes a Ray head consists; `tests/system/test_serve.py` looks at one that runs."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
import ray
import ray._private.node
import ray._private.services

from services.cluster.local_ray import lean_head


def test_a_raylet_starts_our_agents() -> None:
    commands: list[list[str]] = []

    def note(command: list[str], *kind: str, fate_share: bool) -> str:
        commands.append(command)
        return f"{kind[0]} {fate_share}"

    ray_agent = subprocess.list2cmdline([sys.executable, "-u", "agent.py", "--node-id=n"])
    command = ["raylet", "--head", f"--dashboard_agent_command={ray_agent}"]
    command += [f"--runtime_env_agent_command={ray_agent}", "--worker_command=python -c 1"]
    assert lean_head._start_raylet(note, "/s/*_n", command, "raylet", fate_share=True) == "raylet True"
    ((program, first, second, third, last),) = commands
    assert (program, first, last) == ("raylet", "--head", "--worker_command=python -c 1")
    for option, word in zip(lean_head.AGENTS, (second, third), strict=True):
        name, _, agent = word.partition("=")
        assert name == option and shlex.split(agent)[-len(lean_head.AGENTS[option]) :] == list(
            lean_head.AGENTS[option]
        )
        assert str(lean_head.AGENT) in agent and "/s/*_n" in agent and ray_agent not in agent


def test_ray_is_as_it_was_afterwards() -> None:
    node = ray._private.node.Node
    with lean_head.lean_head():
        assert ray._private.node.Node is lean_head.LeanNode
    assert ray._private.node.Node is node


def test_another_version_of_ray_starts_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    node = ray._private.node.Node
    monkeypatch.setattr(ray, "__version__", "2.61.0")
    with lean_head.lean_head():
        assert ray._private.node.Node is node
