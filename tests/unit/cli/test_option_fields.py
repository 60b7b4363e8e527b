"""Commands made of dataclasses: options that are typed, repeated, left out or required."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from diptych.config.fields import option_field
from diptych.errors import ConfigError
from services.bench.options import BenchOptions
from services.cli.calibrate.options import CalibrateOptions
from services.cli.option_fields import options_command, refuse_flags
from services.cli.plan.options import PlanOptions
from services.cli.profile.options import ProfileOptions
from services.cli.simulate.options import SimulateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallOptions:
    place: str = option_field("here", "By position", flag="", show_default=False)
    model: str = option_field(MISSING, "Required")
    out: Path | None = option_field(None, "A file")
    kind: tuple[str, ...] = option_field((), "May be repeated")
    most_count: int = option_field(0, "A number", "Numbers", min=0)
    as_json: bool = option_field(False, "A switch", flag="--json")
    verify: bool = option_field(True, "A switch that is on")
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
        "--most-count",
        "0",
        "--json",
        "--no-verify",
        "there",
    )
    _, got = called(*words)
    given = frozenset({"place", "model", "out", "kind", "most_count", "as_json", "verify"})
    wanted = SmallOptions(
        place="there", model="a", out=Path("b"), kind=("x", "y"), as_json=True, verify=False, given=given
    )
    assert got == [wanted] and isinstance(got[0].kind, tuple)


@pytest.mark.parametrize(
    "words", [(), ("--model", "a", "--most-count", "-1"), ("--model", "a", "--given", "x")]
)
def test_wrong_flags_are_refused(words: tuple[str, ...]) -> None:
    result, got = called(*words)
    assert result.exit_code == 2 and not got


def test_help_lists_the_fields_in_their_order_with_defaults() -> None:
    shown = called("--help")[0].output
    found = [shown.index(flag) for flag in ("--model", "--out", "--kind", "--json", "--verify", "Numbers")]
    assert "Does little." in shown and found == sorted(found)
    assert "default: 0" in shown and "default: None" not in shown and "--given" not in shown
    assert "By position" in shown and "--place" not in shown and "default: here" not in shown


def test_flags_without_effect_are_refused_by_their_own_names() -> None:
    options = SmallOptions(model="a")
    refuse_flags(options, set(), " here", "why", "fix")
    with pytest.raises(ConfigError) as caught:
        refuse_flags(options, {"verify", "as_json", "most_count"}, " here", "why", "fix")
    assert caught.value.what == "--most-count, --json, --verify/--no-verify has no effect here"


@pytest.mark.parametrize(
    "options_type", [BenchOptions, CalibrateOptions, PlanOptions, ProfileOptions, SimulateOptions]
)
def test_flags_are_the_names_of_fields_but_for_a_few(options_type: type) -> None:
    options = [one for one in fields(options_type) if one.metadata]
    flags = [one.metadata.get("flag", one.name) for one in options]
    assert len(set(flags)) == len(flags) and all(one.metadata["help"] for one in options)
    unlike = {one.metadata["flag"] for one in options if "flag" in one.metadata}
    assert unlike <= {"", "--json", "--duration", "--warmup", "--timeout"}
