"""`diptych profile --bulk`: what it measures, writes and adds to a profile, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from engine.cpu.offload import rate_probe
from planner.costs.model import dims_on_cpu, find_model
from planner.costs.profile import CostProfile
from planner.costs.profile_file import load_profile, save_profile
from planner.costs.step import StepCost
from planner.hardware import find_device
from planner.types import Parallelism
from tests.unit.cli.typed_command import run_typed

Run = Callable[..., tuple[int, str, str]]
FEW = partial(
    rate_probe.ProbeSizes,
    rows=(1, 8, 64, 128),
    contexts=(64,),
    prompts=(64,),
    disk_bytes=4 << 20,
    copy_bytes=1 << 20,
    rounds=1,
)
PROFILE = CostProfile(
    dims_on_cpu(find_model("embedded")),
    find_device("cpu"),
    {Parallelism(): StepCost((1e-3, 1e-5, 0.0), ((1e-3, 1e-8, 1e-5),))},
    source="measured",
    fit_error={"prefill_mean": 0.1, "bulk_exact_mean": 9.0},
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr(rate_probe, "ProbeSizes", FEW)
    monkeypatch.setattr(rate_probe, "COLD_BYTES", 1 << 20)

    return partial(run_typed, monkeypatch, capsys)


def test_it_measures_everything_and_a_plan_uses_it(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    code, out, err = run("profile", "--bulk", "--out", str(file), "--bulk-folder", str(tmp_path))
    assert code == 0, err
    assert "a pass" in out and "the disk reads" in out and f"written to {file}" in out
    rates = load_profile(file).bulk
    assert rates is not None and rates.int4 is not None and rates.coded_attention is not None
    assert rates.exact.decode_s(8) > 0 and rates.exact.prompt_row_s > 0 and rates.end_row_s > 0
    assert not list(tmp_path.glob("block-*")), "nothing is left on the disk"
    planned = ("plan", "--model", "embedded", "--bulk", "64:8", "--profile", str(file), "--json")
    code, out, err = run(*planned, "--bulk-memory", "64MiB")
    assert code == 0, err
    found = json.loads(out)
    assert found["rates"] == "measured" and "weight_kind=exact" in found["policy"]
    slow = json.loads(run(*planned, "--bulk-memory", "20MiB", "--bulk-disk-rate", "0.0001GB/s")[1])
    assert slow["waits_for"] == "disk" and slow["tokens_per_s"] < found["tokens_per_s"]


def test_what_else_is_in_a_profile_stays(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    save_profile(PROFILE, file)
    code, out, err = run("profile", "--bulk", "--out", str(file), "--json")
    assert code == 0, err
    found = load_profile(file)
    assert found.bulk is not None and found.costs == PROFILE.costs
    assert json.loads(out)["bulk"]["threads"] == 1
    assert found.fit_error["prefill_mean"] == 0.1 and found.fit_error["bulk_exact_mean"] < 9


def test_what_cannot_be_measured_is_refused(run: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "p.json")
    for words, text in (
        (("--bulk", "--seconds", "3"), "--seconds has no effect with --bulk"),
        (("--bulk-threads", "1"), "--bulk-threads has no effect"),
        (("--bulk", "--bulk-threads", "4096"), "--bulk-threads 4096 cannot be measured"),
        (("--bulk", "--bulk-folder", str(tmp_path / "none")), "cannot be measured"),
    ):
        code, out, err = run("profile", *words, "--out", file)
        assert code == 2 and out == "" and text in err, err
        assert len([line for line in err.splitlines() if not line.endswith("...")]) <= 6
        assert not Path(file).exists()
    code, _, err = run("profile", str(tmp_path), "--bulk", "--out", file)
    assert code != 0 and "Traceback" not in err
