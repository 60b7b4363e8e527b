"""Room for KV: the artefact's table row by row (S2), and why something does not fit."""

from __future__ import annotations

import csv

import pytest

from diptych.errors import ConfigError
from planner.capacity import fits, kv_tokens, smallest
from planner.hardware import device
from planner.shape import known
from planner.terms import Split
from tests.unit.planner.data import distserve

A100 = device("A100-80G")


def test_every_row_of_the_artefacts_table() -> None:
    rows = list(csv.DictReader(distserve("profile_data/max_num_tokens.csv").read_text().splitlines()))
    wrong = [
        row
        for row in rows
        if kv_tokens(known(row["model"]), Split(int(row["tp"]), int(row["pp"])), A100.memory_bytes)
        != int(row["max_num_tokens"])
    ]
    assert (len(rows), wrong) == (76, [])


def test_three_of_them_without_the_file() -> None:
    assert kv_tokens(known("OPT-13B"), Split(1), A100.memory_bytes) == 66144
    assert kv_tokens(known("OPT-66B"), Split(4), A100.memory_bytes) == 78496
    assert kv_tokens(known("OPT-175B"), Split(3, 3), A100.memory_bytes) == 76192


def test_no_room_is_zero_not_negative() -> None:
    assert kv_tokens(known("OPT-66B"), Split(1), A100.memory_bytes) == 0


@pytest.mark.parametrize(
    ("split", "tokens", "word"),
    [
        (Split(5), 0, "heads"),
        (Split(1, 7), 0, "layers"),
        (Split(1), 0, "weights take"),
        (Split(2), 50_000, "of KV"),
    ],
)
def test_what_does_not_fit_names_its_resource(split: Split, tokens: int, word: str) -> None:
    found = fits(known("OPT-66B"), split, A100, tokens)
    assert not found and word in found.why_not


def test_what_fits() -> None:
    found = fits(known("OPT-66B"), Split(4), A100)
    assert found and found.tokens == 78496
    assert smallest(known("OPT-66B"), A100, 8) == Split(2)
    assert smallest(known("Llama-3.1-8B"), device("A10G"), 8) == Split(1)


def test_infeasible_memory_is_told_with_what_would_do() -> None:
    with pytest.raises(ConfigError) as error:
        smallest(known("OPT-175B"), A100, 4)
    assert "memory" in error.value.why and "5 ×" in error.value.fix
    assert len(error.value.lines()) <= 6
