"""What stands where a raylet expects an agent: it writes its ports, and ends with its parent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.cluster.local_ray import agent

PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:])
print(child.pid, flush=True)
child.wait()
"""
PATIENCE_S = 60.0


@pytest.fixture
def parent(tmp_path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", agent.__file__, f"{tmp_path}/*_node", "one=-1", "two=0"]
    return subprocess.Popen([sys.executable, "-c", PARENT, *command], stdout=subprocess.PIPE, text=True)


def test_it_writes_its_ports_and_ends_with_its_parent(parent: subprocess.Popen[str], tmp_path: Path) -> None:
    assert parent.stdout is not None
    with parent, parent.stdout as stdout:
        child = psutil.Process(int(stdout.readline()))
        while not (tmp_path / "two_node").exists():  # the last one that it writes
            assert child.is_running()
        assert (tmp_path / "one_node").read_text() == "-1"
        port = int((tmp_path / "two_node").read_text())
        assert port > 0 and sorted(one.name for one in tmp_path.iterdir()) == ["one_node", "two_node"]
        assert not [one for one in child.net_connections() if one.status == psutil.CONN_LISTEN]
        parent.kill()
        psutil.wait_procs([child], timeout=PATIENCE_S)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
