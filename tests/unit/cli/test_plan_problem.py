"""Flags of `diptych plan` as a question to the planner: on what hardware, with which profile, for which model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.costs.model import dims_on_cpu, find_model
from planner.costs.profile_file import built_in_profile, save_profile
from planner.hardware import NodeSpec, find_device
from planner.placement.problem import Problem
from planner.placement.solve import Solution, solve_placement
from planner.types import DECODE, PREFILL, InstancePool, LinkSpec, Parallelism, Placement
from services.cli.main import main
from services.cli.plan import command
from services.cli.plan.options import PlanOptions
from services.cli.simulate.deployment import simulated_deployment
from services.cli.simulate.options import SimulateOptions
from tests.unit.planner.small_problems import profile, question

Ask = Callable[..., Problem]
PAIR = (InstancePool(PREFILL, Parallelism()), InstancePool(DECODE, Parallelism()))


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Types `diptych plan` with an objective, and gives the question that is asked with it."""

    def typed(*words: object) -> Problem:
        found: list[Problem] = []

        def note(options: PlanOptions) -> int:
            found.append(command.read_problem(options))
            return 0

        monkeypatch.setattr(command, "run_plan", note)
        monkeypatch.setattr(sys, "argv", ["diptych", "plan", "--slo-ttft-ms", "500", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return found[0]

    return typed


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--horizon", "601"), "at first sight: 1 × both TP1, about "), (("--horizon", "600"), ""),
     (("--horizon", "601", "--json"), "")],
)  # fmt: skip
def test_what_short_runs_suggest_is_printed_before_the_search(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not if the search itself is as short, and not beside JSON."""

    def end_search(problem: Problem, report: Callable[[str], None]) -> Solution:
        report("searching")
        raise ConfigError("no answer", "the search ends here", "look at what was printed before")

    monkeypatch.setattr(command, "solve_placement", end_search)
    asked = (
        "--model OPT-13B --device A100-80G --gpus 1 --slo-ttft-ms 400 --slo-tpot-ms 100 --span-s 3 --seeds 1"
    )
    monkeypatch.setattr(sys, "argv", ["diptych", "plan", *asked.split(), *words])
    with pytest.raises(SystemExit):
        main()
    captured = capsys.readouterr()
    assert captured.out.startswith(said) and len(captured.out.splitlines()) == bool(said)
    assert captured.err.splitlines()[0] == "error: no answer"


def test_the_model_is_as_the_profile_has_it(ask: Ask, tmp_path: Path) -> None:
    served = replace(dims_on_cpu(find_model("tiny")), max_len=700)
    save_profile(replace(built_in_profile(served, "cpu"), rooms={Parallelism(): 40_000}), tmp_path / "p.json")
    request = ask("--model", "tiny", "--profile", tmp_path / "p.json")
    assert request.model == served and request.site.token_bytes == 2 * 4 * 6 * 4 * 32
    assert request.longest <= 700 and "700 tokens, and are left out" in request.notes[0]


def test_kv_is_planned_for_in_the_codec_that_was_asked_for(ask: Ask, tmp_path: Path) -> None:
    """4.5 bits of 32, by hand: 6 layers, 4 heads of 32 values, keys and values."""
    request = ask("--model", "tiny", "--device", "cpu", "--gpus", 2, "--kv-cache-codec", "tq4")
    assert request.site.token_bytes == 2 * 6 * 4 * 32 * 4.5 / 8 == 864
    assert "864 bytes per token" in request.notes[-1]
    served = replace(dims_on_cpu(find_model("tiny")), max_len=700)
    measured = replace(
        built_in_profile(served, "cpu"),
        rooms={Parallelism(): 45_000},
        costs={Parallelism(): profile().cost(Parallelism())},
    )
    save_profile(measured, tmp_path / "p.json")
    request = ask("--model", "tiny", "--profile", tmp_path / "p.json", "--kv-cache-codec", "tq4")
    assert request.site.token_bytes == 864
    assert request.site.kv_tokens(InstancePool(PREFILL, Parallelism(), 1, "cpu")) == 320_000
    assert "measured with KV of the class raw" in request.notes[-1]


def test_a_simulated_deployment_moves_coded_kv() -> None:
    options = SimulateOptions(model="tiny", placement="1P + 1D", device="cpu", kv_cache_codec="int8")
    coded = simulated_deployment(options, Slo(1.0, 1.0))
    raw = simulated_deployment(replace(options, kv_cache_codec="raw"), Slo(1.0, 1.0))
    assert (raw.token_bytes, coded.token_bytes) == (2 * 6 * 4 * 32 * 4, 2 * 6 * 4 * 32 * 9 / 8)
    rooms = [one.instances[0].kv_tokens for one in (raw, coded)]
    assert rooms[1] / rooms[0] == pytest.approx(32 / 9, rel=1e-3)


def test_on_the_cpu_there_is_room_for_half_of_what_16_bits_would_take(ask: Ask) -> None:
    request = ask("--model", "tiny", "--device", "cpu", "--gpus", 2)
    assert request.site.token_bytes == 2 * 4 * 6 * 4 * 32
    pool = InstancePool(PREFILL, Parallelism(), 1, "cpu")
    wide = replace(find_model("tiny"), kv_bytes=2.0, weight_bytes=2.0)
    plain = question(measured=replace(profile(find_device("cpu")), model=wide, costs={}, rooms={}))
    assert request.site.kv_tokens(pool) < plain.site.kv_tokens(pool) / 1.9


@pytest.mark.parametrize(
    ("words", "nodes", "per_node"),
    [
        (("--device", "cpu", "--gpus", 3), 1, 3),
        (("--device", "cpu", "--gpus", 4), 1, 4),
        (("--device", "cpu"), 1, 2),
        (("--device", "cpu", "--gpus", 4, "--gpus-per-node", 2), 2, 2),
        (("--device", "cpu", "--nodes", 3), 3, 2),
        (("--device", "H100", "--gpus", 12), 2, 6),
        (("--device", "H100", "--gpus", 4), 1, 4),
    ],
)
def test_devices_are_on_as_few_nodes_as_may_be(
    words: tuple[object, ...], nodes: int, per_node: int, ask: Ask
) -> None:
    (stock,) = ask("--model", "Llama-3.2-1B", *words).groups
    assert (stock.nodes, stock.devices_per_node) == (nodes, per_node)


def test_several_classes_of_kv_are_planned_for(ask: Ask) -> None:
    words = ("--model", "tiny", "--device", "cpu", "--gpus", 2, "--kv-cache-codec", "raw:0.25,tq4")
    problem = ask(*words, "--kv-mix", "raw=0.6,tq4=0.4")
    assert [(one.name, one.share, one.token_bytes) for one in problem.kv_classes] == [
        ("raw", 0.25, 6144),
        ("tq4", 0.75, 864),
    ]
    assert problem.kv_mix == {"raw": 0.6, "tq4": 0.4} and problem.model.kv_codec == ""
    asked = [job.kv_class for job in problem.samples(400)[0]]
    assert asked.count("raw") == pytest.approx(240, abs=45)
    assert problem.notes[-2].startswith("KV class raw: 25% of the bytes for KV, 6,144 bytes per token, 60%")
    assert {job.kv_class for job in ask(*words).samples(50)[0]} == {"raw"}


def test_a_device_of_ones_own_is_found_in_the_profile(ask: Ask, tmp_path: Path) -> None:
    mine = replace(
        find_device("H100"), name="X9", price_per_hour=7.0, node=NodeSpec(2, LinkSpec(1e11), LinkSpec(1e9))
    )
    save_profile(replace(built_in_profile("OPT-13B", "A100-80G"), device=mine), tmp_path / "x9.json")
    words = ("--model", "OPT-13B", "--profile", tmp_path / "x9.json", "--nodes", 2)
    for more in (), ("--device", "x9"):
        request = ask(*words, *more)
        assert request.groups[0].device == mine == request.profiles["X9"].device
        assert request.link(Placement(PAIR)) == LinkSpec(1e9)
    both = ask(*words, "--device", "A100", "--also", "X9:1x2")
    assert [stock.device.name for stock in both.groups] == ["A100-80G", "X9"]
    assert both.profiles["X9"].device == mine


def test_a_link_is_what_is_asked_for_between_nodes(ask: Ask) -> None:
    words = ("--model", "OPT-13B", "--device", "A100", "--link", "10Gbps")
    assert ask(*words, "--nodes", 2).link(Placement(PAIR)) == LinkSpec(1.25e9, 30e-6)
    assert ask(*words, "--nodes", 1).link(Placement(PAIR)).bytes_per_s == 300e9


def test_an_answer_says_how_well_its_costs_were_fitted() -> None:
    fitted = replace(profile(), fit_error={"prefill_held_out_mean": 0.031, "decode_mean": 0.02})
    notes = solve_placement(question(per_node=2, measured=fitted, families=("disaggregated",))).notes
    fit_notes = [note for note in notes if note.startswith("costs of ")]
    assert fit_notes == ["costs of TP1: made up; off in the mean: prefill by 3.1%, decode by 2.0%"], (
        "once for pools that are alike"
    )
