"""The tables of `docs/results/` are those of the runs in `benchmarks/results/`: neither changes alone."""

from __future__ import annotations

import re

import msgspec
import pytest

from benchmarks.results_tables import (
    BLOCK,
    PAGES,
    ROOT,
    RUNS,
    count_hand_words,
    fill_page,
    parse_marker,
    read_program,
    read_programs,
)

TEXTS = {page.name: page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))}
PROGRAMS = read_programs(RUNS)
RUN = """{"date": "2026-11-21", "commit": null, "machine": "two cores", "load": "1", "arguments": "--short",
          "aims": {"gap_ratio": "≥ 5", "lost": "= 0"}, "figures": %s}"""


def sample(*figures: str, command: str = '"python -m benchmarks.sample"') -> str:
    """A program with a run for each text of figures."""
    return f'{{"command": {command}, "runs": [{", ".join(RUN % text for text in figures)}]}}'


def write(marker: str, text: str) -> list[str]:
    """The lines that a marker asks for, from the runs in `text`."""
    page = f"# Page\n\n<!-- table: {marker} -->\nold\n<!-- end -->\n"
    return fill_page(page, {"sample": read_program(text)}).splitlines()[4:-2]


@pytest.mark.parametrize("name", TEXTS)
def test_pages_are_those_of_the_runs(name: str) -> None:
    assert fill_page(TEXTS[name], PROGRAMS) == TEXTS[name], "run `make docs`"


def test_a_figure_that_changes_in_the_page_or_in_the_runs_alone_is_noticed() -> None:
    page, source = TEXTS["transfer.md"], (RUNS / "transfer.json").read_text(encoding="utf-8")
    assert page.count("| 1.015 |") == 1 and source.count("1.015") == 1
    changed = page.replace("| 1.015 |", "| 1.016 |")
    assert fill_page(changed, PROGRAMS) == page
    again = PROGRAMS | {"transfer": read_program(source.replace("1.015", "1.016"))}
    assert fill_page(page, again) == changed


def test_every_run_is_shown_and_every_aim_has_a_figure() -> None:
    shown = {parse_marker(block["marker"])[:2] for text in TEXTS.values() for block in BLOCK.finditer(text)}
    assert {(name, run.name) for name, program in PROGRAMS.items() for run in program.runs} == shown
    for name, program in PROGRAMS.items():
        for run in program.runs:
            assert run.aims.keys() <= {figure for row in run.figures for figure in row}, (name, run.name)


def test_runs_say_where_they_come_from() -> None:
    for name, program in PROGRAMS.items():
        if program.command and program.command.startswith("python -m benchmarks."):
            assert program.command.removeprefix("python -m benchmarks.") == name
            assert (ROOT / "benchmarks" / f"{name}.py").exists()
        for run in program.runs:
            assert run.date is None or re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", run.date), (name, run.date)
            assert run.commit is None or re.fullmatch(r"[0-9a-f]{7}", run.commit), (name, run.commit)


def test_pages_of_figures_are_short() -> None:
    """Words by hand: all text outside of generated tables, counted as `wc -w` does."""
    assert count_hand_words((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")) <= 1500
    assert sum(map(count_hand_words, TEXTS.values())) <= 2000
    assert count_hand_words("two words\n<!-- table: a -->\n\nmany more words\n<!-- end -->\n") == 2


def test_a_table_has_a_line_per_figure() -> None:
    lines = write(
        "sample", sample('[{"gap_ratio": 4.80, "requests": 12345, "lost": 0, "interval": [-1, 2.0]}]')
    )
    assert lines == [
        "| figure | aim | measured |",
        "| --- | --- | --- |",
        "| `gap_ratio` | ≥ 5 | **4.80** |",
        "| requests | | 12,345 |",
        "| lost | = 0 | 0 |",
        "| interval | | −1 to 2.0 |",
        "",
        "2026-11-21, two cores, load: 1: `python -m benchmarks.sample --short`",
    ]


def test_several_rows_are_columns_headed_by_their_first_entry() -> None:
    lines = write("sample", sample('[{"model": "a|b", "gap_ratio": 6}, {"model": "c", "lost": 1}]'))
    assert lines[:4] == [
        "| figure | aim | a\\|b | c |",
        "| --- | --- | --- | --- |",
        "| `gap_ratio` | ≥ 5 | 6 | |",
        "| lost | = 0 | | **1** |",
    ]


def test_columns_make_a_line_per_row_with_the_aims_last() -> None:
    text = '[{"model": "a", "gap_ratio": 6, "note": null}]'
    assert write("sample | model | gap_ratio | note", sample(text, command="null")) == [
        "| model | `gap_ratio` | note |",
        "| --- | --- | --- |",
        "| a | 6 | |",
        "| aim | ≥ 5 | |",
        "",
        "2026-11-21, two cores, load: 1: no committed program",
    ]
    lines = write("sample | gap_ratio", sample(text, '[{"gap_ratio": [4, 5, 6]}]'))
    assert lines[:5] == [
        "| run | `gap_ratio` |",
        "| --- | --- |",
        "| 1 | 6 |",
        "| 2 | **4, 5, 6** |",
        "| aim | ≥ 5 |",
    ]
    assert [line[:2] for line in lines[6:]] == ["1.", "2."]


def test_what_is_not_there_is_an_error() -> None:
    for marker in ("other", "sample/other", "sample | lost"):
        with pytest.raises(ValueError, match=re.escape(marker)):
            write(marker, sample('[{"gap_ratio": 6}]'))
    with pytest.raises(msgspec.ValidationError, match="figure"):
        read_program('{"command": null, "runs": [{"figure": []}]}')
    with pytest.raises(msgspec.ValidationError, match="date"):
        read_program(sample("[]").replace('"date": "2026-11-21", ', ""))
