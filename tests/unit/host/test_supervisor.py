"""One child kept alive: reports read, started again, given up on, stopped. Children are `tests.system.stub_child`."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from diptych.process import EXIT_LOST
from diptych.specs import WorkerSpec
from services.host.child_environment import (
    child_environment,
    import_path_environment,
    prepare_joined_environment,
    prepare_ray_environment,
)
from services.host.supervision.oom_kills import count_oom_kills
from services.host.supervision.supervisor import (
    ChildStatus,
    ErrorReport,
    Supervisor,
    describe_exit,
    exit_cause,
    last_log_line,
    restart_delay_s,
    start_error,
)
from tests.support.product_trees import WHEEL_PACKAGES
from tests.support.terminal import traps
from tests.support.waiting import wait_for
from tests.system import stub_child

ROOT = Path(__file__).parents[3]
PATIENCE_S = 90.0


def until(supervisor: Supervisor, wanted: Callable[[ChildStatus], bool]) -> ChildStatus:
    """Wait for a status; every change is looked at, none is polled for."""
    status = supervisor.status()
    while not wanted(status):
        newer = supervisor.wait_status(status.version, PATIENCE_S)
        assert newer.version != status.version, f"no change in {PATIENCE_S} s: {status}"
        status = newer
    return status


Start = Callable[..., Supervisor]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a supervised child that does what it is asked to; all are stopped at the end."""
    started: list[Supervisor] = []

    def begin(does: str, **more: object) -> Supervisor:
        command = [sys.executable, "-m", "tests.system.stub_child"]
        spec = f'{{"model": "{does}"}}'.encode()
        environ = child_environment(1, os.environ)
        one = Supervisor("w-0", command, spec, tmp_path / "logs" / "w-0.log", environ, **more)  # type: ignore[arg-type]
        started.append(one)
        one.start()
        return one

    yield begin
    for one in started:
        one.stop(0.1)


def test_reports_of_a_child_are_read_until_it_is_ready(start: Start) -> None:
    one = start(stub_child.READY)
    status = until(one, lambda now: now.state == "ready")
    assert psutil.Process(status.pid).ppid() == os.getpid()
    assert (status.restarts, status.crashes, status.error) == (0, 0, None)


def test_a_killed_child_is_started_again_at_once(start: Start) -> None:
    one = start(stub_child.READY)
    first = until(one, lambda now: now.state == "ready")
    psutil.Process(first.pid).kill()
    waiting = until(one, lambda now: now.state != "ready")
    assert (waiting.ended, waiting.restarts) == ("killed by SIGKILL", 1)
    second = until(one, lambda now: now.state == "ready")
    assert second.pid != first.pid and second.restarts == 1


def test_delays_grow_to_five_seconds_and_start_at_none() -> None:
    assert [restart_delay_s(crashes) for crashes in range(9)] == [0, 0, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert restart_delay_s(100_000) == 5.0, "after days of crashes too"


def test_an_error_reported_while_starting_ends_the_attempts(start: Start) -> None:
    one = start(stub_child.REFUSE)
    failed = until(one, lambda now: now.state == "failed")
    assert failed.error == ErrorReport("the model does not fit", "needs 9 GiB\nhas 1 GiB", "a smaller one")
    assert start_error(failed).lines() == [
        "error: the model does not fit",
        "  why: needs 9 GiB",
        "       has 1 GiB",
        "  fix: a smaller one",
    ]


def test_a_child_that_dies_silently_while_starting_is_tried_three_times(start: Start, tmp_path: Path) -> None:
    one = start(stub_child.SILENT)
    failed = until(one, lambda now: now.state == "failed")
    assert failed.crashes == 3 and failed.pid == 0
    lines = start_error(failed, tmp_path / "logs" / "w-0.log").lines()
    assert "killed by SIGKILL, 3 times" in lines[1]
    assert lines[-1] == "  fix: the last line of its log: Segmentation fault in the tests"


def test_a_child_that_was_ready_is_never_given_up(start: Start, tmp_path: Path) -> None:
    one = start(stub_child.READY, start_attempts=1)
    for restarts in range(3):
        status = until(one, lambda now, wanted=restarts: now.state == "ready" and now.restarts == wanted)  # type: ignore[misc]
        psutil.Process(status.pid).kill()
    assert until(one, lambda now: now.restarts == 3).crashes == 3


def test_a_crash_after_a_steady_life_counts_as_the_first(start: Start) -> None:
    one = start(stub_child.READY, steady_s=0.0)
    for restarts in range(3):
        status = until(one, lambda now, wanted=restarts: now.state == "ready" and now.restarts == wanted)  # type: ignore[misc]
        psutil.Process(status.pid).kill()
    assert until(one, lambda now: now.restarts == 3).crashes == 1


def test_a_crash_loop_is_called_by_its_name() -> None:
    assert not ChildStatus("w", crashes=4).looping
    assert ChildStatus("w", crashes=5).looping


@pytest.mark.parametrize("does", [stub_child.READY, stub_child.HANG])
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
    failed = until(one, lambda now: now.state == "failed")
    assert "cannot start w-0" in start_error(failed).what and failed.crashes == 3
    assert failed.ended == "it cannot be started: No such file or directory"
    one.stop()


@pytest.mark.parametrize("was_ready", [True, False])
def test_a_fork_that_fails_is_tried_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, was_ready: bool
) -> None:
    """What follows an out-of-memory kill: the process died, and the next one cannot be made for a while."""
    real, errors = subprocess.Popen, [errno.EAGAIN, errno.ENOMEM]

    def failing(*args: Any, **more: Any) -> Any:
        if errors:
            number = errors.pop()
            raise OSError(number, os.strerror(number))
        return real(*args, **more)

    if not was_ready:
        monkeypatch.setattr(subprocess, "Popen", failing)
    one = start(stub_child.READY)
    if was_ready:
        first = until(one, lambda now: now.state == "ready")
        monkeypatch.setattr(subprocess, "Popen", failing)
        psutil.Process(first.pid).kill()
    refused = until(one, lambda now: "cannot be started" in now.ended)
    assert refused.state == "waiting" and refused.pid == 0
    back = until(one, lambda now: now.state == "ready" and not errors)
    assert (back.restarts, back.error) == (2 + was_ready, None)


def test_a_child_that_was_ready_is_tried_for_as_long_as_it_cannot_be_started(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here its log cannot be opened, as on a full disk; how the worker had ended still reaches the next one."""
    monkeypatch.setattr("services.host.supervision.supervisor.restart_delay_s", lambda _crashes: 0.01)
    one = start(stub_child.READY)
    first = until(one, lambda now: now.state == "ready")
    logs, away = tmp_path / "logs", tmp_path / "away"
    logs.rename(away)
    logs.write_text("not a folder")
    psutil.Process(first.pid).kill()
    until(one, lambda now: now.crashes > 20)
    assert one._spec_changes["ended"] == "killed"
    logs.unlink()
    away.rename(logs)
    assert until(one, lambda now: now.state == "ready").pid != first.pid


def test_a_child_that_nobody_could_hear_does_not_stay(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start(stub_child.READY)
    first = until(one, lambda now: now.state == "ready")
    children: list[subprocess.Popen[bytes]] = []
    real = threading.Thread.start

    def failing(thread: threading.Thread) -> None:
        if thread.name == "messages w-0" and not children:
            assert one._child is not None
            children.append(one._child)
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    psutil.Process(first.pid).kill()
    back = until(one, lambda now: now.state == "ready" and bool(children))
    assert back.pid != children[0].pid and children[0].returncode == -signal.SIGKILL


def test_a_mistake_in_the_supervision_itself_is_a_failure_that_is_reported(start: Start) -> None:
    def prepare() -> None:
        raise ValueError("a mistake of ours")

    failed = until(start(stub_child.READY, prepare=prepare), lambda now: now.state == "failed")
    assert failed.error == ErrorReport("w-0 is not supervised any more", "ValueError: a mistake of ours")


def test_a_supervisor_that_was_started_again_itself_never_gives_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.host.supervision.supervisor.restart_delay_s", lambda _crashes: 0.01)
    one = start(stub_child.REFUSE, restarted=True)
    assert until(one, lambda now: now.crashes > 4).state != "failed"


def test_whatever_prepares_a_start_is_done_before_each_and_may_fail(start: Start) -> None:
    done: list[int] = []

    def prepare() -> None:
        done.append(1)
        if len(done) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    one = start(stub_child.READY, prepare=prepare)
    psutil.Process(until(one, lambda now: now.state == "ready").pid).kill()
    until(one, lambda now: now.state == "ready" and len(done) == 3)


def test_stop_before_start_is_nothing() -> None:
    one = Supervisor("w-0", ["true"], b"{}")
    one.stop()
    assert one.status().state == "stopped"


def test_endings_in_words() -> None:
    assert [describe_exit(3), describe_exit(-9), describe_exit(-99)] == [
        "exit status 3",
        "killed by SIGKILL",
        "killed by signal 99",
    ]


def test_the_last_words_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_log_line(log) == ""
    log.write_bytes(b"x\n" * 9000 + b"end\xff\n\n")
    assert last_log_line(log) == "end\ufffd"


def test_children_get_threads_and_packages_and_no_secrets() -> None:
    environ = child_environment(
        3, {"RAY_AUTH_TOKEN": "t", "DIPTYCH_API_KEY": "k", "HOME": "/h", "PYTHONPATH": "/p"}
    )
    assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "3"
    assert environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/p"]
    assert environ["HOME"] == "/h" and environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert not {"RAY_AUTH_TOKEN", "DIPTYCH_API_KEY"} & set(environ)


def test_rays_daemons_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    names = ("DIPTYCH_API_KEY", "DIPTYCH_ADMIN_KEY", "DIPTYCH_METRICS_KEY")
    environ = {**dict.fromkeys(names, "a secret"), "DIPTYCH_PORT": "1"}
    prepare_ray_environment(environ)
    assert "a secret" not in environ.values() and environ["DIPTYCH_PORT"] == "1"


def test_ray_gets_a_new_token_and_nothing_of_another_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    first, second = ({"RAY_ADDRESS": "auto", "RAY_AUTH_TOKEN": "old"} for _ in range(2))
    for environ in (first, second):
        prepare_ray_environment(environ)
        assert "RAY_ADDRESS" not in environ and environ["RAY_AUTH_MODE"] == "token"
        assert (
            int(environ["RAY_ROTATION_MAX_BYTES"]) < 1 << 25 and environ["RAY_ROTATION_BACKUP_COUNT"] == "1"
        )
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"] and len(first["RAY_AUTH_TOKEN"]) == 64


def test_ray_is_not_started_by_a_call_that_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may ask a cluster that was left meanwhile: by default Ray would start one of its own then."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    environ = {"RAY_ADDRESS": "10.0.0.1:6379"}
    prepare_joined_environment(environ)
    assert environ["RAY_ENABLE_AUTO_CONNECT"] == "0" and environ["RAY_ADDRESS"] == "10.0.0.1:6379"


# ---- what a child learns about the ones before it

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


def test_a_child_learns_how_the_one_before_it_ended_and_keeps_its_role(tmp_path: Path) -> None:
    book = tmp_path / "book"
    spec = msgspec.json.encode(
        WorkerSpec(worker="w-0", role="decode", gateway="g", keys_dir="k", model=str(book))
    )
    one = Supervisor("w-0", [sys.executable, "-c", LIVES], spec, environ=child_environment(1, os.environ))
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


def test_a_child_whose_specification_has_no_such_fields_learns_nothing_new(tmp_path: Path) -> None:
    book = tmp_path / "book"
    code = "import sys, pathlib; line = sys.stdin.readline()\n"
    code += f"with pathlib.Path({str(book)!r}).open('a') as out: out.write(line)\n"
    code += 'print(\'{"phase": "ready"}\', flush=True); sys.exit(4 if len(pathlib.Path('
    code += f"{str(book)!r}).read_text()) > 4 else 1)"
    one = Supervisor(
        "gateway", [sys.executable, "-c", code], b"{ }", environ=child_environment(1, os.environ)
    )
    one.start()
    until(one, lambda now: now.state == "retired")
    one.stop()
    assert [json.loads(line) for line in book.read_text().splitlines()] == [{}, {}]


def test_who_ends_a_process_from_outside_is_not_its_own_doing() -> None:
    causes = {code: exit_cause(code) for code in (0, 1, 3, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV)}
    assert list(causes.values()) == ["", "crashed", "crashed", "killed", "killed", "crashed"]
    assert exit_cause(EXIT_LOST) == "killed"
    starved = {code: exit_cause(code, starved=True) for code in (0, 1, -signal.SIGKILL, -signal.SIGTERM)}
    assert list(starved.values()) == ["", "crashed", "crashed", "killed"]


def test_a_kill_for_memory_is_a_crash_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts such kills, before it kills: here the count grows while the first child lives."""
    book, counts = tmp_path / "book", iter([0, 1])
    monkeypatch.setattr("services.host.supervision.supervisor.count_oom_kills", lambda: next(counts, 1))
    spec = msgspec.json.encode(
        WorkerSpec(worker="w-0", role="decode", gateway="g", keys_dir="k", model=str(book))
    )
    one = Supervisor("w-0", [sys.executable, "-c", LIVES], spec, environ=child_environment(1, os.environ))
    one.start()
    assert until(one, lambda now: now.restarts == 1).ended == "killed by SIGKILL, for want of memory"
    until(one, lambda now: now.state == "retired")
    one.stop()
    endings = [json.loads(line)[0] for line in book.read_text().splitlines()]
    assert endings == ["", "crashed", "crashed", "crashed", "killed", ""]


def test_a_kill_for_memory_long_before_is_another_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some other process was killed for memory while this one lived; then somebody killed this one."""
    looks, kinds = itertools.count(), list[bool]()

    def note(_code: int, starved: bool) -> str:
        kinds.append(starved)
        return "killed"

    monkeypatch.setattr("services.host.supervision.supervisor.CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr("services.host.supervision.supervisor.count_oom_kills", lambda: min(next(looks), 1))
    monkeypatch.setattr("services.host.supervision.supervisor.exit_cause", note)
    one = Supervisor("one", [sys.executable, "-c", "import time; time.sleep(600)"], b"{}")
    one.start()
    try:
        pid = until(one, lambda now: now.pid > 0).pid
        wait_for(lambda: next(looks) > 20, 60.0)
        os.kill(pid, signal.SIGKILL)
        assert until(one, lambda now: now.restarts == 1).ended == "killed by SIGKILL"
    finally:
        one.stop()
    assert kinds[0] is False


@pytest.mark.parametrize(
    ("member", "file", "line"),
    [
        ("0::/pod/part\n", "pod/part/memory.events", "low 0\nhigh 2\nmax 7\noom 5\noom_kill 4\n"),
        ("0::/\n", "memory.events", "oom_kill 4\noom_group_kill 9\n"),
        ("5:cpu:/x\n4:memory:/x/y\n0::/\n", "memory/memory.oom_control", "oom_kill_disable 0\noom_kill 4\n"),
        ("4:cpu,memory:/x\n", "memory/x/memory.oom_control", "under_oom 0\noom_kill 4\n"),
        ("0::/user/session\n", "user/memory.events", "low 0\noom_kill 4\n"),
        ("0::/elsewhere\n", "vmstat", "oom_kill 4\nballoon 1\n"),
    ],
)
def test_kills_for_memory_are_counted_where_the_kernel_tells_them(
    tmp_path: Path, member: str, file: str, line: str
) -> None:
    (tmp_path / "self").write_text(member)
    (tmp_path / "user" / "session").mkdir(parents=True)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(line)
    places = (tmp_path, tmp_path / "self", tmp_path / "vmstat")
    assert count_oom_kills(*places) == 4
    (tmp_path / file).unlink()
    assert count_oom_kills(*places) == 0


SUPERVISE = """
import pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
from services.host.supervision.supervisor import Supervisor
eats = "import sys; print('{\\"phase\\": \\"ready\\"}', flush=True); b'x' * (512 << 20)"
one = Supervisor("w-0", [sys.executable, "-c", eats], b"{}")
one.start()
status = one.status()
while not status.restarts:
    status = one.wait_status(status.version, 60)
one.stop()
print(status.ended)
"""


def test_a_child_that_the_kernel_kills_for_memory_is_known_by_it(memory_group: Path) -> None:
    command = [sys.executable, "-c", SUPERVISE, str(memory_group)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert result.stdout == "killed by SIGKILL, for want of memory\n"


# ---- what a child imports

OURS = WHEEL_PACKAGES
NAMED = f"import importlib, json; print(json.dumps([importlib.import_module(n).__path__[0] for n in {OURS}]))"


@pytest.mark.parametrize("given", ["", ".", "./", f"{os.pathsep}.", "sub/.."])
def test_children_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    marker = traps(tmp_path, [*OURS, "json", "torch"])
    monkeypatch.chdir(tmp_path)
    environ = child_environment(1, os.environ | {"PYTHONPATH": given})
    command = [
        sys.executable,
        "-c",
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {NAMED!r}])",
    ]
    for words in (command, [sys.executable, "-c", NAMED]):  # a child of a child, and a child
        shown = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
        assert json.loads(shown.stdout) == [str(ROOT / name) for name in OURS]
    subprocess.run([sys.executable, "-m", "diptych.process"], env=environ, check=True)
    assert not marker.exists()


def test_relative_entries_of_the_import_path_are_those_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = import_path_environment({"PYTHONPATH": os.pathsep.join(["lib", "", ".", "/p", "lib"])})[
        "PYTHONPATH"
    ]
    assert found.split(os.pathsep) == [str(ROOT), str(tmp_path / "lib"), "/p"]


REJECTED_ONCE_READY = """
import json, sys
sys.stdin.readline()
print(json.dumps({"phase": "ready", "done": 1, "total": 1}), flush=True)
print(json.dumps({"error": {"what": "the gateway rejects this worker", "why": "pid 7", "fix": ""}}), flush=True)
sys.exit(5)
"""


def test_a_worker_that_the_gateway_rejects_is_not_started_again() -> None:
    """Also when it was ready before: it would take the place of the other one, again and again."""
    command = [sys.executable, "-c", REJECTED_ONCE_READY]
    one = Supervisor("w-0", command, b"{}", environ=child_environment(1, os.environ))
    one.start()
    last = until(one, lambda now: now.state == "failed")
    one.stop()
    assert last.restarts == 0 and last.error is not None and last.error.why == "pid 7"
