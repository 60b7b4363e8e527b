"""One child kept alive: heard, started again, given up on, stopped. Children are `tests.system.stub`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from diptych.config import WorkerSpec
from services.cluster.environment import child_environ, prepare_ray
from services.cluster.supervisor import Status, Supervisor, Told, cause, delay_s, ending, raised, tail
from tests.system import stub

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0


def until(supervisor: Supervisor, wanted: Callable[[Status], bool]) -> Status:
    """Wait for a status; every change is looked at, none is polled for."""
    status = supervisor.status()
    while not wanted(status):
        newer = supervisor.wait(status.version, PATIENCE_S)
        assert newer.version != status.version, f"no change in {PATIENCE_S} s: {status}"
        status = newer
    return status


Start = Callable[..., Supervisor]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a supervised child that does what it is told; all are stopped at the end."""
    started: list[Supervisor] = []

    def begin(does: str, **more: object) -> Supervisor:
        command = [sys.executable, "-m", "tests.system.stub"]
        spec = f'{{"model": "{does}"}}'.encode()
        environ = child_environ(1, os.environ)
        one = Supervisor("w-0", command, spec, tmp_path / "logs" / "w-0.log", environ, **more)  # type: ignore[arg-type]
        started.append(one)
        one.start()
        return one

    yield begin
    for one in started:
        one.stop(0.1)


def test_a_child_is_heard_until_it_is_ready(start: Start) -> None:
    one = start(stub.READY)
    status = until(one, lambda now: now.state == "ready")
    assert psutil.Process(status.pid).ppid() == os.getpid()
    assert (status.restarts, status.crashes, status.error) == (0, 0, None)


def test_a_killed_child_is_started_again_at_once(start: Start) -> None:
    one = start(stub.READY)
    first = until(one, lambda now: now.state == "ready")
    psutil.Process(first.pid).kill()
    waiting = until(one, lambda now: now.state != "ready")
    assert (waiting.ended, waiting.restarts) == ("killed by SIGKILL", 1)
    second = until(one, lambda now: now.state == "ready")
    assert second.pid != first.pid and second.restarts == 1


def test_delays_grow_to_five_seconds_and_start_at_none() -> None:
    assert [delay_s(crashes) for crashes in range(9)] == [0, 0, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_an_error_told_while_starting_ends_the_attempts(start: Start) -> None:
    one = start(stub.REFUSE)
    failed = until(one, lambda now: now.state == "failed")
    assert failed.error == Told("the model does not fit", "needs 9 GiB\nhas 1 GiB", "a smaller one")
    assert raised(failed).lines() == [
        "error: the model does not fit",
        "  why: needs 9 GiB",
        "       has 1 GiB",
        "  fix: a smaller one",
    ]


def test_a_child_that_dies_silently_while_starting_is_tried_three_times(start: Start, tmp_path: Path) -> None:
    one = start(stub.SILENT)
    failed = until(one, lambda now: now.state == "failed")
    assert failed.crashes == 3 and failed.pid == 0
    lines = raised(failed, tmp_path / "logs" / "w-0.log").lines()
    assert "killed by SIGKILL, 3 times" in lines[1]
    assert lines[-1] == "  fix: its last words: Segmentation fault in the tests"


def test_a_child_that_was_ready_is_never_given_up(start: Start, tmp_path: Path) -> None:
    one = start(stub.READY, start_attempts=1)
    for restarts in range(3):
        status = until(one, lambda now, wanted=restarts: now.state == "ready" and now.restarts == wanted)  # type: ignore[misc]
        psutil.Process(status.pid).kill()
    assert until(one, lambda now: now.restarts == 3).crashes == 3


def test_a_crash_after_a_steady_life_counts_as_the_first(start: Start) -> None:
    one = start(stub.READY, steady_s=0.0)
    for restarts in range(3):
        status = until(one, lambda now, wanted=restarts: now.state == "ready" and now.restarts == wanted)  # type: ignore[misc]
        psutil.Process(status.pid).kill()
    assert until(one, lambda now: now.restarts == 3).crashes == 1


def test_a_crash_loop_is_called_by_its_name() -> None:
    assert not Status("w", crashes=4).looping
    assert Status("w", crashes=5).looping


@pytest.mark.parametrize("does", [stub.READY, stub.HANG])
def test_stop_ends_the_child_whatever_it_does(start: Start, does: str) -> None:
    one = start(does)
    child = psutil.Process(until(one, lambda now: now.state == "ready").pid)
    one.stop(0.2)
    assert not child.is_running()
    assert (one.status().state, one.status().pid) == ("stopped", 0)
    one.stop(0.2)


def test_a_child_that_cannot_be_started_is_a_failure(tmp_path: Path) -> None:
    one = Supervisor("w-0", [str(tmp_path / "absent")], b"{}")
    one.start()
    assert "cannot start w-0" in raised(until(one, lambda now: now.state == "failed")).what
    one.stop()


def test_stop_before_start_is_nothing() -> None:
    one = Supervisor("w-0", ["true"], b"{}")
    one.stop()
    assert one.status().state == "stopped"


def test_endings_in_words() -> None:
    assert [ending(3), ending(-9), ending(-99)] == [
        "exit status 3",
        "killed by SIGKILL",
        "killed by signal 99",
    ]


def test_the_last_words_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_bytes(b"x\n" * 9000 + b"end\xff\n\n")
    assert tail(log) == "end\ufffd"


def test_children_get_threads_and_packages_and_no_secrets() -> None:
    environ = child_environ(
        3, {"RAY_AUTH_TOKEN": "t", "DIPTYCH_API_KEY": "k", "HOME": "/h", "PYTHONPATH": "/p"}
    )
    assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "3"
    assert environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/p"]
    assert environ["HOME"] == "/h"
    assert not {"RAY_AUTH_TOKEN", "DIPTYCH_API_KEY"} & set(environ)


def test_ray_gets_a_new_token_and_nothing_of_another_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    first, second = ({"RAY_ADDRESS": "auto", "RAY_AUTH_TOKEN": "old"} for _ in range(2))
    for environ in (first, second):
        prepare_ray(environ)
        assert "RAY_ADDRESS" not in environ and environ["RAY_AUTH_MODE"] == "token"
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"] and len(first["RAY_AUTH_TOKEN"]) == 64


# ---- what a child is told about the ones before it

LIVES = """
import json, os, pathlib, signal, sys, time
spec = json.loads(sys.stdin.buffer.readline())
book = pathlib.Path(spec["model"])
with book.open("a") as lines:
    print(json.dumps([spec["ended"], spec["role"]]), file=lines)
lives = len(book.read_text().splitlines())
print(json.dumps({"phase": "ready", "done": 1, "total": 1}), flush=True)
if lives == 1: os.kill(os.getpid(), signal.SIGKILL)
if lives == 2: print(json.dumps({"role": "prefill"}), flush=True); os.abort()
if lives == 3: sys.exit(1)
if lives == 4: os.kill(os.getpid(), signal.SIGTERM)
if lives == 5: sys.exit(0)
sys.exit(4)
"""


def test_a_child_is_told_how_the_one_before_it_ended_and_keeps_its_role(tmp_path: Path) -> None:
    book = tmp_path / "book"
    spec = msgspec.json.encode(
        WorkerSpec(worker="w-0", role="decode", gateway="g", keys_dir="k", model=str(book))
    )
    one = Supervisor("w-0", [sys.executable, "-c", LIVES], spec, environ=child_environ(1, os.environ))
    one.start()
    last = until(one, lambda now: now.state == "retired")
    one.stop()
    assert (last.ended, last.restarts, last.error) == ("drained", 5, None)
    assert [json.loads(line) for line in book.read_text().splitlines()] == [
        ["", "decode"],
        ["killed", "decode"],
        ["crashed", "prefill"],
        ["crashed", "prefill"],
        ["killed", "prefill"],
        ["", "prefill"],
    ]


def test_a_child_whose_specification_has_no_such_fields_is_told_nothing_new(tmp_path: Path) -> None:
    book = tmp_path / "book"
    code = "import sys, pathlib; line = sys.stdin.readline()\n"
    code += f"with pathlib.Path({str(book)!r}).open('a') as out: out.write(line)\n"
    code += 'print(\'{"phase": "ready"}\', flush=True); sys.exit(4 if len(pathlib.Path('
    code += f"{str(book)!r}).read_text()) > 4 else 1)"
    one = Supervisor("gateway", [sys.executable, "-c", code], b"{ }", environ=child_environ(1, os.environ))
    one.start()
    until(one, lambda now: now.state == "retired")
    one.stop()
    assert [json.loads(line) for line in book.read_text().splitlines()] == [{}, {}]


def test_who_ends_a_process_from_outside_is_not_its_own_doing() -> None:
    told = {code: cause(code) for code in (0, 1, 3, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV)}
    assert list(told.values()) == ["", "crashed", "crashed", "killed", "killed", "crashed"]
