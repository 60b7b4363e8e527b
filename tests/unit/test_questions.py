"""Flags of `diptych plan` as a question to the planner: on what hardware, with which profile, for which model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.hardware import Node, device
from planner.placement import place
from planner.profile import built_in, save
from planner.request import Request
from planner.shape import known, on_cpu
from planner.terms import DECODE, PREFILL, Link, Placement, Pool, Split
from services.cli import planning
from services.cli.main import main
from tests.unit.planner.planned import profile, question

Ask = Callable[..., Request]
PAIR = (Pool(PREFILL, Split()), Pool(DECODE, Split()))


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Types `diptych plan` with an objective, and gives the question that is asked with it."""

    def typed(*words: object) -> Request:
        found: list[Request] = []

        def note(options: Mapping[str, Any]) -> int:
            found.append(planning.question(options))
            return 0

        monkeypatch.setattr(planning, "plan", note)
        monkeypatch.setattr(sys, "argv", ["diptych", "plan", "--slo-ttft-ms", "500", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return found[0]

    return typed


def test_the_model_is_as_the_profile_has_it(ask: Ask, tmp_path: Path) -> None:
    served = replace(on_cpu(known("tiny")), max_len=700)
    save(replace(built_in(served, "cpu"), rooms={Split(): 40_000}), tmp_path / "p.json")
    request = ask("--model", "tiny", "--profile", tmp_path / "p.json")
    assert request.model == served and request.site.token_bytes == 2 * 4 * 6 * 4 * 32
    assert request.longest <= 700 and "700 tokens, and are left out" in request.notes[0]


def test_on_the_cpu_there_is_room_for_half_of_what_16_bits_would_take(ask: Ask) -> None:
    request = ask("--model", "tiny", "--device", "cpu", "--gpus", 2)
    assert request.site.token_bytes == 2 * 4 * 6 * 4 * 32
    pool = Pool(PREFILL, Split(), 1, "cpu")
    wide = replace(known("tiny"), kv_bytes=2.0, weight_bytes=2.0)
    plain = question(measured=replace(profile(device("cpu")), model=wide, costs={}, rooms={}))
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
    (stock,) = ask("--model", "Llama-3.2-1B", *words).stocks
    assert (stock.nodes, stock.devices_per_node) == (nodes, per_node)


def test_a_device_of_ones_own_is_found_in_the_profile(ask: Ask, tmp_path: Path) -> None:
    mine = replace(device("H100"), name="X9", price_per_hour=7.0, node=Node(2, Link(1e11), Link(1e9)))
    save(replace(built_in("OPT-13B", "A100-80G"), device=mine), tmp_path / "x9.json")
    words = ("--model", "OPT-13B", "--profile", tmp_path / "x9.json", "--nodes", 2)
    for more in (), ("--device", "x9"):
        request = ask(*words, *more)
        assert request.stocks[0].device == mine == request.profiles["X9"].device
        assert request.link(Placement(PAIR)) == Link(1e9)
    both = ask(*words, "--device", "A100", "--also", "X9:1x2")
    assert [stock.device.name for stock in both.stocks] == ["A100-80G", "X9"]
    assert both.profiles["X9"].device == mine


def test_a_link_is_what_is_asked_for_between_nodes(ask: Ask) -> None:
    words = ("--model", "OPT-13B", "--device", "A100", "--link", "10Gbps")
    assert ask(*words, "--nodes", 2).link(Placement(PAIR)) == Link(1.25e9, 30e-6)
    assert ask(*words, "--nodes", 1).link(Placement(PAIR)).bytes_per_s == 300e9


def test_an_answer_says_how_well_its_costs_were_fitted() -> None:
    fitted = replace(profile(), fit_error={"prefill_held_out_mean": 0.031, "decode_mean": 0.02})
    notes = place(question(per_node=2, measured=fitted, families=("disaggregated",))).notes
    told = [note for note in notes if note.startswith("costs of ")]
    assert told == ["costs of TP1: made up; off in the mean: reading by 3.1%, writing by 2.0%"], (
        "once for pools that are alike"
    )
