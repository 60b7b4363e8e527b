"""A worker process: what it reads, what it says, how it ends (real processes, without torch)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from diptych.specs import WorkerSpec

ROOT = Path(__file__).resolve().parents[3]
SPEC = WorkerSpec(
    worker="prefill-0",
    role="prefill",
    gateway="tcp://127.0.0.1:1",
    keys_dir="keys",
    model="model",
)
Ending = tuple[int, list[dict[str, object]], str]


def start(body: str) -> subprocess.Popen[bytes]:
    """A process that runs `body` (the inside of `main(spec, voice)`) under `supervised`."""
    code = "import os, sys, signal\nfrom diptych.errors import *\nfrom diptych.process import *\n"
    code += "configure_and_report()\ndef main(spec, voice):\n" + textwrap.indent(
        textwrap.dedent(body), "    "
    )
    code += "\nsys.exit(run_supervised(main))\n"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)


def finish(process: subprocess.Popen[bytes], line: bytes) -> Ending:
    """(exit status, JSON lines on standard output, standard error)."""
    out, err = process.communicate(line, timeout=120)
    lines = [json.loads(text) for text in out.splitlines()]
    assert lines.pop(0) == {"phase": "load", "done": 0, "total": 1}  # said before anything heavy is imported
    return process.returncode, lines, err.decode()


def run(body: str, line: bytes = msgspec.json.encode(SPEC) + b"\n") -> Ending:
    return finish(start(body), line)


def test_progress_is_reported_in_json_lines_and_stray_prints_stay_out_of_them() -> None:
    status, lines, err = run(
        'print("noise of a library")\nvoice.report_progress("load", 1, 3)\nvoice.report_progress(spec.worker)'
    )
    assert status == 0
    assert lines == [
        {"phase": "load", "done": 1, "total": 3},
        {"phase": "prefill-0", "done": 1, "total": 1},
    ]
    assert "noise" in err


def test_an_expected_error_is_one_line_and_status_3() -> None:
    status, lines, err = run('raise ModelError("no weights", "the folder is empty", "download it")')
    assert status == 3
    assert lines == [{"error": {"what": "no weights", "why": "the folder is empty", "fix": "download it"}}]
    assert "Traceback" not in err


def test_an_unexpected_error_is_one_line_and_status_1() -> None:
    status, lines, err = run('raise RuntimeError("first line\\nsecond line")')
    assert status == 1
    (line,) = lines
    error = line["error"]
    assert isinstance(error, dict)
    assert error["why"].startswith("RuntimeError: first line second line (at ")
    assert "Traceback" not in err


def test_a_lost_device_ends_the_process_with_one_line_whatever_threads_still_run() -> None:
    status, lines, err = run(
        """
        import threading
        threading.Thread(target=signal.pause).start()
        try:
            raise_if_lost(RuntimeError("CUDA error: an illegal\\nmemory access"))
        except Exception:
            os._exit(77)
        """
    )
    fix = "the worker is restarted by its supervisor"
    why = "RuntimeError: CUDA error: an illegal memory access"
    assert lines == [{"error": {"what": "the device failed", "why": why, "fix": fix}}]
    assert status == 6 and "Traceback" not in err


@pytest.mark.parametrize("line", [b"", b"\n", b"{}\n", b'{"worker": 3}\n', b"\xff\n"])
def test_a_specification_that_cannot_be_read_is_an_expected_error(line: bytes) -> None:
    status, lines, _ = run("pass", line)
    assert status == 3
    assert "specification" in str(lines)


def test_a_core_that_is_not_there_is_an_expected_error() -> None:
    status, lines, _ = run("pin_to_core(4095)")
    assert (status, "core 4095" in str(lines)) == (3, True)


def test_pinning_binds_the_thread_that_asks_and_spares_those_before_it() -> None:
    body = """
        import threading
        core = min(os.sched_getaffinity(0))
        whole, done, seen = os.sched_getaffinity(0), threading.Event(), []
        early = threading.Thread(target=lambda: (done.wait(), seen.append(os.sched_getaffinity(0))))
        early.start()
        pin_to_core(core)
        done.set()
        early.join()
        assert os.sched_getaffinity(0) == {core}
        assert seen == [whole]
    """
    assert run(body)[0] == 0


def test_a_worker_does_not_outlive_its_supervisor() -> None:
    child = "import os, signal\nfrom diptych.process import configure_and_report\nconfigure_and_report()\n"
    child += "print(os.getpid(), flush=True)\nsignal.pause()\n"
    parent = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    keeper = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    keeper.stdout.readline()
    pid = int(keeper.stdout.readline())
    watch = os.pidfd_open(pid)
    keeper.send_signal(signal.SIGKILL)
    keeper.wait()
    assert keeper.stdout.read() == b""  # end of file: the child, who shares the pipe, is gone as well
    keeper.stdout.close()
    os.close(watch)


def test_one_thread_is_asked_for_before_anything_can_read_it() -> None:
    code = "from diptych.process import *\nconfigure_and_report()\n"
    code += "print(os.environ['OMP_NUM_THREADS'], os.environ['NUMBA_NUM_THREADS'])"
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    for given, expected in (({}, "1 1"), ({"OMP_NUM_THREADS": "2"}, "2 2")):
        command = [sys.executable, "-c", code]
        out = subprocess.run(command, cwd=ROOT, env=clean | given, capture_output=True, check=True)
        assert out.stdout.decode().splitlines()[-1] == expected
