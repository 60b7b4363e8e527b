"""The check of a GPU without a GPU: its limits, its parts' ends, and what it says where there is no device."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_parts import check_part, copies, kernels, vllm_chain
from benchmarks.gpu_parts.check_part import CheckPart, PartContext
from benchmarks.vllm_parts.served import OWN_FLAG, serve_command
from diptych.errors import ConfigError
from kvcache.device.copies import CopyBatch, DirectCopies
from vllm_worker.setup.engine_args import EngineOptions, build_arguments, connector_config

# What a part's process does, by its name.
SCRIPTS = {
    "env": "record(gpu='made up')",
    "good": "record(good_ratio=0.9)",
    "poor": "record(poor_ratio=0.5)",
    "dies": "record(before=1); import os; os.kill(os.getpid(), 9)",
    "raises": "record(raised=1, error='ValueError: no'); sys.exit(1)",
    "hangs": (
        "record(half=2); import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=None);"
        "record(child=child.pid); time.sleep(600)"
    ),
}
RECORD = """
import json, pathlib, sys, time
known = {}
def record(**more):
    known.update(more)
    pathlib.Path(sys.argv[1]).write_text(json.dumps(known))
"""


def make_part(name: str, limit_s: float = 60.0, **aims: str) -> CheckPart:
    return CheckPart(name, "none:none", limit_s, aims)


def script_of(part: CheckPart, device: str, folder: Path) -> list[str]:
    return [sys.executable, "-c", RECORD + SCRIPTS[part.name], str(folder / f"{part.name}.json")]


def test_a_part_that_hangs_or_fails_stops_no_other_and_keeps_what_it_measured(tmp_path: Path) -> None:
    parts = [
        make_part("env"),
        make_part("hangs", 3.0, half="= 2", never="≥ 1"),
        make_part("dies"),
        make_part("raises"),
        make_part("poor", poor_ratio="≥ 0.8"),
        make_part("good", good_ratio="≥ 0.8"),
    ]
    said: list[str] = []
    found = gpu_check.run_check(parts, "emulated", tmp_path, command_of=script_of, say=said.append)
    states = {name: part["state"] for name, part in found["parts"].items()}
    assert states == {
        "env": "done",
        "hangs": "timeout",
        "dies": "failed",
        "raises": "failed",
        "poor": "done",
        "good": "done",
    }
    figures = found["figures"]
    assert (figures["half"], figures["before"], figures["raised"], figures["good_ratio"]) == (2, 1, 1, 0.9)
    assert found["broken"] == ["hangs", "dies", "raises"] and found["missed"] == ["never", "poor_ratio"]
    assert found["parts"]["raises"]["error"] == "ValueError: no" and "error" not in figures
    assert "stopped after 3 s" in found["parts"]["hangs"]["error"]
    assert len(said) == len(parts)
    # Nothing that a part has started is left of it.
    deadline_s = time.monotonic() + 30
    while psutil.pid_exists(figures["child"]) and time.monotonic() < deadline_s:
        if psutil.Process(figures["child"]).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    else:
        assert not psutil.pid_exists(figures["child"])
    assert json.loads((tmp_path / "result.json").read_text()) == found


def test_results_are_on_disk_after_every_part(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def note(line: str) -> None:
        seen.append(list(json.loads((tmp_path / "result.json").read_text())["parts"]))

    parts = [make_part("env"), make_part("good")]
    gpu_check.run_check(parts, "emulated", tmp_path, command_of=script_of, say=note)
    assert seen == [["env"], ["env", "good"]]


def test_parts_for_which_no_time_is_left_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "MIN_PART_S", 60.0)
    parts = [make_part("env"), make_part("hangs", 3.0), make_part("good"), make_part("poor")]
    total_s = gpu_check.SPARE_S + 62.0
    found = gpu_check.run_check(parts, "emulated", tmp_path, total_s, command_of=script_of)
    assert [part["state"] for part in found["parts"].values()] == ["done", "timeout", "left out", "left out"]
    assert found["broken"] == ["hangs", "good", "poor"]


def test_without_a_usable_device_no_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCRIPTS, "env", "sys.exit(1)")
    parts = [make_part("env"), make_part("good", good_ratio="≥ 0.8")]
    found = gpu_check.run_check(parts, "cuda", tmp_path, command_of=script_of)
    assert list(found["parts"]) == ["env"] and found["broken"] == ["env", "good"]
    assert found["missed"] == ["good_ratio"]


def test_without_a_device_the_command_says_so_with_a_status_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--json", "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, cwd=gpu_check.ROOT, capture_output=True, text=True)
    assert ended.returncode == gpu_check.NO_DEVICE == 3
    lines = ended.stderr.splitlines()
    assert 1 < len(lines) <= 6 and lines[0].startswith("error: "), ended.stderr
    assert not ended.stdout and not (tmp_path / "out").exists()


def test_vllm_is_asked_only_where_it_is_and_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(check_part.PYTHON_VARIABLE, raising=False)
    without = gpu_check.usual_parts()
    with pytest.raises(ConfigError) as refused:
        vllm_chain.vllm_python()
    assert check_part.PYTHON_VARIABLE in refused.value.fix
    monkeypatch.setenv(check_part.PYTHON_VARIABLE, "/somewhere/python")
    assert [*without, gpu_check.VLLM_PART] == gpu_check.usual_parts() == [one.name for one in gpu_check.PARTS]
    assert vllm_chain.vllm_python() == "/somewhere/python"


def test_vllm_serve_gets_the_flags_of_a_worker() -> None:
    options = EngineOptions(
        "folder", dtype="float32", max_model_len=512, max_num_seqs=8, vllm_args=("--enforce-eager",)
    )
    command = [part.format(home="/home", port=8765) for part in serve_command(options, is_cpu=True)]
    assert command[:6] == ["/home/bin/vllm", "serve", "folder", "--port", "8765", "--enforce-eager"]
    worker = build_arguments(options, is_cpu=True)
    own = {"--model", "--kv-transfer-config", OWN_FLAG, json.dumps(connector_config({}))}
    assert set(worker) - set(command) == own
    assert set(command) - set(worker) == {*command[:2], "--port", "8765", "--max-num-batched-tokens", "520"}


@pytest.mark.parametrize(
    ("broken", "missed", "state", "status"),
    [([], [], "done", 0), (["good"], [], "done", 1), ([], ["x"], "done", 1), (["env"], ["x"], "failed", 3)],
)
def test_the_exit_status_says_whether_all_is_well(
    broken: list[str],
    missed: list[str],
    state: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = {"broken": broken, "missed": missed, "parts": {"env": {"state": state}}, "figures": {}}
    monkeypatch.setattr(gpu_check, "run_check", lambda *args, **more: summary)
    monkeypatch.setattr(gpu_check, "find_gpus", list)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--json", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert ended.value.code == status and json.loads(capsys.readouterr().out) == summary


def test_the_error_of_a_part_is_recorded_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(context: PartContext) -> None:
        context.record({"before": 1})
        raise ConfigError("it does not fit", "too large", "take less")

    monkeypatch.setattr(kernels, "record_environment", refuse)
    (part,) = (part for part in gpu_check.PARTS if part.name == "env")
    assert check_part.measure_here(part, "emulated", tmp_path) == 1
    found = json.loads((tmp_path / "env.json").read_text())
    assert found == {"before": 1, "error": "ConfigError: it does not fit; too large"}


def test_limits_fit_into_eight_minutes_and_aims_can_be_compared() -> None:
    limits_s = {part.name: part.limit_s for part in gpu_check.PARTS}
    assert limits_s.pop(gpu_check.VLLM_PART) == gpu_check.VLLM_S  # which come on top
    assert sum(limits_s.values()) + gpu_check.SPARE_S <= gpu_check.TOTAL_S == 480
    assert gpu_check.PARTS[0].name == gpu_check.FIRST_PART
    for part in gpu_check.PARTS:
        assert not any(gpu_check.is_met(None, aim) for aim in part.aims.values())
    assert gpu_check.is_met(0.1, "≤ 0.1") and not gpu_check.is_met(0.11, "≤ 0.1")


def test_kernel_tests_are_there() -> None:
    """Their names as pytest knows them; without a device they are skipped, which does not count as passed."""
    options = ["-q", "-p", "no:xdist", "-p", "no:schemathesis", "-m", "gpu", "--collect-only"]
    command = [sys.executable, "-m", "pytest", *options]
    listed = subprocess.run(
        [*command, *kernels.KERNEL_TESTS], cwd=gpu_check.ROOT, capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert all(name in listed.stdout for name in kernels.KERNEL_TESTS)


def test_a_test_that_is_skipped_has_not_passed(tmp_path: Path) -> None:
    context = PartContext("emulated", tmp_path, tmp_path / "kernels.json")
    counter = kernels.OutcomeCounter(context)
    for when, outcome in (("setup", "passed"), ("call", "passed"), ("setup", "skipped"), ("call", "failed")):
        counter.pytest_runtest_logreport(Report("tests/x.py::test_a", when, outcome))
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert found["kernels_passed"] == 1 and len(found["kernels_failing"]) == 2
    assert found["kernels_failed"] == len(kernels.KERNEL_TESTS) - 1


def test_copies_and_hand_offs_are_measured(tmp_path: Path) -> None:
    """On CPU tensors: each byte arrives, and there is a figure for every size."""
    context = PartContext("emulated", tmp_path, tmp_path / "copies.json")
    copies.measure_copies(context)
    found = json.loads(context.file.read_text())
    names = {f"handoff_ms_{tokens}" for tokens in copies.TOKENS} | {"to_host_gb_per_s", "to_device_gb_per_s"}
    assert found["handoff_wrong"] == 0 and all(found[name] > 0 for name in (*names, "copy_ratio"))


class SpoilingCopies(DirectCopies):
    """Copies all slabs but one."""

    def to_device(self, pairs: Sequence[tuple[int, int]]) -> CopyBatch:
        return super().to_device([pair for pair in pairs if pair[1] != 3])


def test_a_chunk_that_does_not_arrive_is_counted() -> None:
    device = torch.device("cpu")
    with (
        copies.DeviceSide(copies.TOY, 8, device) as source,
        copies.DeviceSide(copies.TOY, 8, device) as target,
    ):
        target.copies = SpoilingCopies(target.pool, target.buffer.memory.view)
        source.fill(1)
        links = copies.link_buffers(source, target)
        assert copies.hand_over(links, source, target, 6)[1] == 1
        assert copies.hand_over(links, source, target, 3)[1] == 0
        links.close()


class Report:
    """What pytest says of a test."""

    def __init__(self, nodeid: str, when: str, outcome: str) -> None:
        self.nodeid, self.when = nodeid, when
        self.passed, self.failed, self.skipped = (outcome == one for one in ("passed", "failed", "skipped"))
