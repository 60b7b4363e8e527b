"""Room for KV: the artefact's table row by row (S2), and why something does not fit."""

from __future__ import annotations

import csv

import pytest

from diptych.errors import ConfigError
from planner.costs.capacity import check_memory_fit, kv_capacity_tokens, smallest_split
from planner.costs.model import find_model
from planner.hardware import find_device
from planner.types import Parallelism
from tests.unit.planner.paper_data import distserve

A100 = find_device("A100-80G")


def test_every_row_of_the_artefacts_table() -> None:
    rows = list(csv.DictReader(distserve("profile_data/max_num_tokens.csv").read_text().splitlines()))
    wrong = [
        row
        for row in rows
        if kv_capacity_tokens(
            find_model(row["model"]), Parallelism(int(row["tp"]), int(row["pp"])), A100.memory_bytes
        )
        != int(row["max_num_tokens"])
    ]
    assert (len(rows), wrong) == (76, [])


def test_three_of_them_without_the_file() -> None:
    assert kv_capacity_tokens(find_model("OPT-13B"), Parallelism(1), A100.memory_bytes) == 66144
    assert kv_capacity_tokens(find_model("OPT-66B"), Parallelism(4), A100.memory_bytes) == 78496
    assert kv_capacity_tokens(find_model("OPT-175B"), Parallelism(3, 3), A100.memory_bytes) == 76192


def test_no_room_is_zero_not_negative() -> None:
    assert kv_capacity_tokens(find_model("OPT-66B"), Parallelism(1), A100.memory_bytes) == 0


@pytest.mark.parametrize(
    ("split", "tokens", "word"),
    [
        (Parallelism(5), 0, "heads"),
        (Parallelism(1, 7), 0, "layers"),
        (Parallelism(1), 0, "weights take"),
        (Parallelism(2), 50_000, "of KV"),
    ],
)
def test_what_does_not_fit_names_its_resource(split: Parallelism, tokens: int, word: str) -> None:
    found = check_memory_fit(find_model("OPT-66B"), split, A100, tokens)
    assert not found and word in found.why_not


def test_what_fits() -> None:
    found = check_memory_fit(find_model("OPT-66B"), Parallelism(4), A100)
    assert found and found.tokens == 78496
    assert smallest_split(find_model("OPT-66B"), A100, 8) == Parallelism(2)
    assert smallest_split(find_model("Llama-3.1-8B"), find_device("A10G"), 8) == Parallelism(1)


def test_infeasible_memory_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError) as error:
        smallest_split(find_model("OPT-175B"), A100, 4)
    assert "memory" in error.value.why and "5 ×" in error.value.fix
    assert len(error.value.lines()) <= 6
