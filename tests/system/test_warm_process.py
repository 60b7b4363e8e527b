"""Programs that are forked for tests are what programs that are started would be, but for their imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.host.child_environment import child_environment
from tests.support.terminal import clean_environ
from tests.support.warm_process import WarmProcess, WarmServer

PROBE = [sys.executable, "-m", "tests.support.warm_probe", "one", "two"]
STREAMS: dict[str, Any] = {
    "stdin": subprocess.PIPE,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "text": True,
}


def probe(**more: Any) -> dict[str, Any]:
    """What the program says of itself; it has ended as it should."""
    process = WarmProcess(PROBE, **STREAMS, **more)
    out, errors = process.communicate("a line\n", timeout=300)
    assert process.returncode == 7 and errors == "an error\n", errors
    found: dict[str, Any] = json.loads(out)
    assert found["pid"] == process.pid and found["parent"] == os.getpid()
    assert found["words"] == ["one", "two"] and found["line"] == "a line\n"
    return found


def test_a_forked_program_is_a_child_with_its_own_environment_folder_and_session(tmp_path: Path) -> None:
    environ = dict(os.environ) | {"MADE_UP": "yes"}
    found = probe(env=environ, cwd=tmp_path, start_new_session=True)
    assert found["forked"] and found["environ"] == environ
    assert (found["folder"], found["session"]) == (str(tmp_path), found["pid"])
    usual = probe()
    assert usual["forked"] and usual["session"] == os.getsid(0) and "MADE_UP" not in usual["environ"]
    assert usual["random"] != found["random"]
    # The one beyond the streams is of the folder that was listed.
    assert len(usual["descriptors"]) == 4


def test_the_parts_of_a_deployment_are_forked() -> None:
    environ = child_environment(1, clean_environ())
    found = probe(env=environ)
    assert found["forked"] and found["environ"] == environ


FRESH: list[dict[str, Any]] = [
    {"env": {**os.environ, "NUMBA_CACHE_DIR": "/nowhere"}},
    {"env": {**os.environ, "PYTHONHASHSEED": "1"}},
    {"env": {**os.environ, "PYTHONPATH": "/nowhere"}},
    {"pass_fds": [2]},
]


@pytest.mark.parametrize("more", FRESH)
def test_what_must_be_given_to_a_fresh_interpreter_gets_one(more: dict[str, Any]) -> None:
    assert not probe(**more)["forked"]


def test_signals_reach_it_and_its_end_is_known() -> None:
    with WarmProcess(PROBE, **STREAMS) as process:
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL


def test_the_server_outlives_what_it_forks() -> None:
    before = WarmServer.running()
    assert probe()["forked"] and WarmServer.running() is before is not None
