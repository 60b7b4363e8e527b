"""`diptych plan` as it is called: the answer in its forms, and what it says where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.costs.profile_file import built_in_profile, save_profile
from planner.placement.plan_file import load_plan
from services.cli.main import main

ASKED = (
    "--model", "OPT-13B", "--device", "A100-80G", "--gpus", "2", "--workload", "sharegpt", "--slo-ttft-ms", "400",
    "--slo-tpot-ms", "100", "--horizon", "40", "--seeds", "1", "--span-s", "3",
)  # fmt: skip


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli.main", "plan", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_an_answer_in_all_its_forms(tmp_path: Path) -> None:
    done = plan(*ASKED, "--explain", "--what-if", "tpot=x2", "--json", "--out", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["best"]["devices"] <= 2 and figures["best"]["goodput_rps"] > 0.0
    assert figures["what_if"][0]["change"] == "tpot=x2" and figures["what_if"][0]["answer"]
    assert figures["verified"]["requests"] >= 40
    assert any("what limits it" in line for line in figures["explanation"])
    found = load_plan(tmp_path / "plan.json")
    assert found.model == "OPT-13B" and str(found.placement) == figures["best"]["placement"]


def test_an_answer_in_words_with_its_plots(tmp_path: Path) -> None:
    done = plan(*ASKED, "--explain", "--plot", str(tmp_path / "plots"), "--no-verify")
    assert done.returncode == 0, done.stderr
    for said in ("goodput", "what limits it", "where the time goes", "elsewhere", "disaggregate"):
        assert said in done.stdout
    drawn = [line.removeprefix("drawn: ") for line in done.stdout.splitlines() if line.startswith("drawn: ")]
    assert drawn == [
        str(tmp_path / "plots" / f"{name}.{end}")
        for name in ("attainment", "goodput", "break_even")
        for end in ("png", "json")
    ]
    (answer,) = [
        curve
        for curve in json.loads((tmp_path / "plots" / "goodput.json").read_bytes())["curves"]
        if curve["name"].startswith("the answer: ")
    ]
    assert done.stdout.startswith(answer["name"].removeprefix("the answer: "))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "abacus"), "not known"),
        (("--slo-ttft-ms", "5"), "nearest that is possible"),
        (("--slo-tpot-ms", "1"), "nearest that is possible"),
        (("--model", "OPT-175B"), "does not fit"),
        (("--rate", "1000"), "do not carry"),
        (("--what-if", "moon=full"), "is no change"),
        (("--workload", "no/such/trace.csv"), "no/such/trace.csv"),
        (("--kind", "chat=sharegpt"), "cannot be read"),
        (("--affinity", "odd"), "not possible"),
        (("--kind", "chat=sharegpt:inf:250:100"), "cannot be read"),
        (("--kind", "chat=sharegpt:1:250:100"), "--slo-ttft-ms has no effect"),
        (("--profile", "no/such/profile.json"), "no/such/profile.json"),
        (("--cv", "inf"), "cannot be drawn"),
        (("--span-s", "inf"), "not possible"),
        (("--out", "no/such/plan.json"), "no folder"),
        (("--plot", "/dev/null"), "--plot /dev/null cannot be written"),
        (("--out", "/proc/plan.json"), "--out /proc/plan.json cannot be written"),
        (("--plot", "/proc"), "--plot /proc cannot be written"),
        (("--gpus", "1", "--family", "disaggregated"), "a device each"),
        (("--family", "hybrid", "--affinity", "high"), "--affinity high"),
    ],
)
def test_no_answer_is_explained_in_six_lines(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: half a second of imports is spared each of them."""
    monkeypatch.setattr(sys, "argv", ["diptych", "plan", *ASKED, *words])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert ended.value.code == 2, captured.out
    assert said in captured.err and "Traceback" not in captured.err
    assert 2 <= len(captured.err.strip().splitlines()) <= 6


def test_no_answer_is_explained_by_the_command_as_well() -> None:
    done = plan(*ASKED, "--device", "abacus")
    assert done.returncode == 2 and "not known" in done.stderr and "Traceback" not in done.stderr
    assert 2 <= len(done.stderr.strip().splitlines()) <= 6


def test_a_profile_of_other_devices_is_not_passed_over(tmp_path: Path) -> None:
    save_profile(built_in_profile("OPT-13B", "A100-80G"), tmp_path / "profile.json")
    asked = [word if word != "A100-80G" else "H100" for word in ASKED]
    done = plan(*asked, "--profile", str(tmp_path / "profile.json"))
    assert done.returncode == 2 and "the profile is of A100-80G" in done.stderr, done.stdout


def test_requests_that_the_model_cannot_take_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = tmp_path / "long.csv"
    rows = ["arrival_s,prompt_len,output_len", *(f"{at},{100 + at},20" for at in range(20)), "20,3000,20"]
    trace.write_text("\n".join(rows) + "\n")
    asked = [word if word != "sharegpt" else str(trace) for word in ASKED]
    done = plan(*asked, "--no-verify", "--json")
    assert done.returncode == 0, done.stderr
    (note, *_) = json.loads(done.stdout)["notes"]
    assert (
        "1 of its 21 requests are longer than the context of OPT-13B, 2,048 tokens, and are left out" in note
    )
    trace.write_text("\n".join([rows[0], rows[-1]]) + "\n")
    done = plan(*asked)
    assert done.returncode == 2 and "no request fits a context of 2,048 tokens" in done.stderr
    assert 2 <= len(done.stderr.strip().splitlines()) <= 6
