"""Commands made of dataclasses: options that are typed, repeated, left out or required."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from services.bench.options import BenchOptions
from services.cli.option_fields import option_field, options_command
from services.cli.plan.options import PlanOptions
from services.cli.simulate.options import SimulateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallOptions:
    model: str = field(metadata={"flag": "--model", "help": "Required"})
    out: Path | None = option_field(None, "--out", "A file")
    kind: tuple[str, ...] = option_field((), "--kind", "May be repeated")
    count: int = option_field(0, "--count", "A number", "Numbers", min=0)
    as_json: bool = option_field(False, "--json", "A switch")
    verify: bool = option_field(True, "--verify/--no-verify", "A switch that is on")
    given: frozenset[str] = frozenset()


def called(*words: str) -> tuple[Any, list[SmallOptions]]:
    """Calls a command with `SmallOptions` that exits with status 3; returns typer's result and what it got."""
    got: list[SmallOptions] = []

    @options_command(SmallOptions)
    def small(options: SmallOptions) -> int:
        """Does little."""
        got.append(options)
        return 3

    app = typer.Typer()
    app.command()(small)
    return CliRunner().invoke(app, words), got


def test_without_flags_an_option_has_the_default_of_its_field() -> None:
    result, got = called("--model", "a")
    assert result.exit_code == 3
    assert got == [SmallOptions(model="a", given=frozenset({"model"}))]


def test_flags_become_fields_and_the_typed_ones_are_known() -> None:
    words = (
        "--model",
        "a",
        "--out",
        "b",
        "--kind",
        "x",
        "--kind",
        "y",
        "--count",
        "0",
        "--json",
        "--no-verify",
    )
    _, got = called(*words)
    given = frozenset({"model", "out", "kind", "count", "as_json", "verify"})
    wanted = SmallOptions(model="a", out=Path("b"), kind=("x", "y"), as_json=True, verify=False, given=given)
    assert got == [wanted] and isinstance(got[0].kind, tuple)


@pytest.mark.parametrize("words", [(), ("--model", "a", "--count", "-1"), ("--model", "a", "--given", "x")])
def test_wrong_flags_are_refused(words: tuple[str, ...]) -> None:
    result, got = called(*words)
    assert result.exit_code == 2 and not got


def test_help_lists_the_fields_in_their_order_with_defaults() -> None:
    shown = called("--help")[0].output
    found = [shown.index(flag) for flag in ("--model", "--out", "--kind", "--json", "--verify", "Numbers")]
    assert "Does little." in shown and found == sorted(found)
    assert "default: 0" in shown and "default: None" not in shown and "--given" not in shown


@pytest.mark.parametrize("options_type", [BenchOptions, PlanOptions, SimulateOptions])
def test_every_flag_is_named_once(options_type: type) -> None:
    flags = [one.metadata["flag"] for one in fields(options_type) if one.metadata]
    assert len(set(flags)) == len(flags) and all(flag.startswith("--") for flag in flags)
