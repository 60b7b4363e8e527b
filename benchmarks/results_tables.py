"""Writes the tables of `docs/results/` from the runs in `benchmarks/results/`.

    python -m benchmarks.results_tables

`benchmarks/results/PROGRAM.json` holds what one command printed:

    command     what is run, without arguments; null if no committed program prints these figures
    runs        one entry per run:
        name        tells the runs of one program apart; left out if there is only one kind
        date        day of the run, or the day on which its figures were recorded
        commit      checkout that was measured; before 2026-11-29 the commit that recorded the figures
        machine, load, arguments    as recorded; null or "" if nothing is recorded
        aims        for each figure that has one: `≥ 0.6`, `≤ 2`, `= 0`, `± 0.03`, or other text
        figures     rows: each maps a figure to a number, a text, null, or a list (two numbers are an interval)

A page asks for a table by a marker, and everything up to `<!-- end -->` is written by this program:

    <!-- table: PROGRAM -->                     a line per figure, of all runs without a name
    <!-- table: PROGRAM/NAME -->                the same of the runs with this name; with several rows, the first entry
                                                of each row is the heading of its column
    <!-- table: PROGRAM/NAME | a | b | c -->    a line per row, with these columns

A number that misses its aim is bold. Numbers keep the digits that they have in the file. Under each table stand date,
commit, machine, load average and command of each run.
"""

from __future__ import annotations

import argparse
import json
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

import benchmarks.script_path  # noqa: F401

ROOT = Path(__file__).parents[1]
RUNS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
BLOCK = re.compile(r"<!-- table: (?P<marker>.+?) -->\n(?P<table>.*?)<!-- end -->", re.DOTALL)
BOUND = re.compile(r"([≥≤=±]) (-?\d+(?:\.\d+)?)")
BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "≥": operator.ge,
    "≤": operator.le,
    "=": operator.eq,
    "±": lambda value, bound: abs(value) <= bound,
}
NUMBER = re.compile(r"-?\d+(\.\d+)?")
FIGURE_NAME = re.compile(r"[a-z][\w.%-]*_[\w.%-]*")

Value = str | list[str] | None  # numbers are texts, so that none of their digits is lost
Row = dict[str, Value]


class Run(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One run of a program: where and when, and what it printed."""

    name: str = ""
    date: str | None
    commit: str | None
    machine: str | None
    load: str | None
    arguments: str
    aims: dict[str, str] = {}
    figures: list[Row]


class Program(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All recorded runs of a command."""

    command: str | None
    runs: list[Run]


def read_program(text: str) -> Program:
    """Parse a file of runs; raises `msgspec.ValidationError` if a field is missing, unknown or of another type."""
    return msgspec.convert(json.loads(text, parse_float=str, parse_int=str), Program)


def read_programs(folder: Path) -> dict[str, Program]:
    """All programs of a folder, by name."""
    return {
        file.stem: read_program(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))
    }


def parse_marker(marker: str) -> tuple[str, str, list[str]]:
    """Program, name of its runs, and columns of a marker: `PROGRAM[/NAME][ | COLUMN ...]`."""
    source, *columns = (part.strip() for part in marker.split(" | "))
    program, _, name = source.partition("/")
    return program, name, columns


def fill_page(text: str, programs: Mapping[str, Program]) -> str:
    """The page with every table written anew; raises `ValueError` for a marker that asks for what is not there."""

    def write(block: re.Match[str]) -> str:
        return f"<!-- table: {block['marker']} -->\n\n{_fill(block['marker'], programs)}\n\n<!-- end -->"

    return BLOCK.sub(write, text)


def count_hand_words(text: str) -> int:
    """Words of a page as `wc -w` counts them, without the generated tables and their markers."""
    return len(BLOCK.sub("", text).split())


def _fill(marker: str, programs: Mapping[str, Program]) -> str:
    source, name, columns = parse_marker(marker)
    program = programs.get(source)
    runs = [run for run in program.runs if run.name == name] if program else []
    if program is None or not runs:
        raise ValueError(f"table {marker!r}: no such program or run in benchmarks/results")
    known = {figure for run in runs for row in run.figures for figure in row}
    if absent := [column for column in columns if column not in known]:
        raise ValueError(f"table {marker!r}: no run has {', '.join(absent)}")
    table = _rows_as_lines(runs, columns) if columns else _figures_as_lines(runs)
    return f"{_markdown(table)}\n\n{_describe_runs(program.command, runs)}"


def _rows_as_lines(runs: list[Run], columns: list[str]) -> list[list[str]]:
    """A line per row of figures, and one with the aims; the number of the run comes first if there are several."""
    lines = [["run", *map(_heading, columns)]]
    for number, run in enumerate(runs, 1):
        lines += [
            [str(number), *(_cell(run, column, row.get(column)) for column in columns)] for row in run.figures
        ]
    aims = [_find_aim(runs, column) for column in columns]
    if len(runs) > 1:
        return [*lines, ["aim", *aims]] if any(aims) else lines
    lines = [line[1:] for line in lines]
    return [*lines, [f"aim {aims[0]}".strip(), *aims[1:]]] if any(aims) else lines


def _figures_as_lines(runs: list[Run]) -> list[list[str]]:
    """A line per figure: its aim, and its value in each row; with several rows the first entry of each is a heading."""
    rows = [(run, row) for run in runs for row in run.figures]
    headings = ["measured"] if len(rows) == 1 else [_format(next(iter(row.values()))) for _, row in rows]
    label = None if len(rows) == 1 else next(iter(rows[0][1]))
    figures = list(dict.fromkeys(figure for _, row in rows for figure in row if figure != label))
    aims = {figure: _find_aim(runs, figure) for figure in figures}
    lines = [["figure", "aim", *headings]]
    lines += [
        [_heading(figure), aims[figure], *(_cell(run, figure, row.get(figure)) for run, row in rows)]
        for figure in figures
    ]
    return lines if any(aims.values()) else [[line[0], *line[2:]] for line in lines]


def _find_aim(runs: list[Run], figure: str) -> str:
    return next((run.aims[figure] for run in runs if figure in run.aims), "")


def _cell(run: Run, figure: str, value: Value) -> str:
    bound = BOUND.fullmatch(run.aims.get(figure, ""))
    numbers = value if isinstance(value, list) else [value or ""]
    missed = bound is not None and any(
        NUMBER.fullmatch(number) and not BOUNDS[bound[1]](float(number), float(bound[2]))
        for number in numbers
    )
    return f"**{_format(value)}**" if missed else _format(value)


def _format(value: Value) -> str:
    """As it stands in the file: thousands are grouped, two numbers are an interval, a minus is one."""
    if value is None:
        return ""
    if isinstance(value, list):
        return (" to " if len(value) == 2 else ", ").join(map(_format, value))
    if not NUMBER.fullmatch(value):
        return value.replace("|", "\\|")
    whole, dot, digits = value.replace("-", "−").partition(".")
    return re.sub(r"(?<=\d)(?=(\d{3})+$)", ",", whole) + dot + digits


def _heading(figure: str) -> str:
    return f"`{figure}`" if FIGURE_NAME.fullmatch(figure) else figure.replace("|", "\\|")


def _markdown(lines: list[list[str]]) -> str:
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(
        f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in ruled
    )


def _describe_runs(command: str | None, runs: list[Run]) -> str:
    """Where the figures come from: a line, or a numbered line per run."""
    lines = []
    for run in runs:
        load = f"load: {run.load}" if run.load else None
        commit = f"`{run.commit}`" if run.commit else None
        where = ", ".join(part for part in (run.date, commit, run.machine, load) if part)
        asked = f"`{f'{command} {run.arguments}'.strip()}`" if command else "no committed program"
        lines.append(f"{where}: {asked}")
    return lines[0] if len(lines) == 1 else "\n".join(f"{at}. {line}" for at, line in enumerate(lines, 1))


def main() -> None:
    argparse.ArgumentParser(
        description="Write the tables of docs/results from benchmarks/results."
    ).parse_args()
    programs = read_programs(RUNS)
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(fill_page(page.read_text(encoding="utf-8"), programs), encoding="utf-8")


if __name__ == "__main__":
    main()
