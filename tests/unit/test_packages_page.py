"""docs/packages.md draws the rows of `.importlinter`, and lists the packages that there are, with a text for each."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

from tests.support.product_trees import trees

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"( *)(\w+)/ +(\S.*)")


def contract_rows(text: str) -> list[set[str]]:
    """The rows of packages in `.importlinter`, from the top."""
    contracts = configparser.ConfigParser()
    contracts.read_string(text)
    lines = contracts["importlinter:contract:layers"]["layers"].split("\n")
    return [{name.strip() for name in line.split("|")} for line in lines if line]


def drawn_rows(drawing: str, packages: set[str]) -> list[set[str]]:
    """The rows of a drawing, from the top: the names of packages in each line that has some."""
    rows = [set(line.split()) & packages for line in drawing.splitlines()]
    return [row for row in rows if row]


def listed_packages(tree: str) -> list[str]:
    """The paths of an indented list of folders, in its order. Raises ValueError for a line without a text."""
    parents: list[str] = []
    found = []
    for line in tree.splitlines():
        entry = ENTRY.fullmatch(line)
        if entry is None:
            raise ValueError(f"no folder with a text: {line!r}")
        parents[len(entry[1]) // 2 :] = [entry[2]]
        found.append("/".join(parents))
    return found


def test_the_drawing_has_the_rows_of_the_contract_and_the_list_every_package() -> None:
    drawing, tree = FENCE.findall((ROOT / "docs/packages.md").read_text(encoding="utf-8"))
    rows = contract_rows((ROOT / ".importlinter").read_text(encoding="utf-8"))
    packages = {path.parts[0] for path in trees()}
    assert set().union(*rows) == packages
    assert drawn_rows(drawing, packages) == rows
    product = {str(path.parent) for path in trees()}
    beside = {str(file.parent.relative_to(ROOT)) for file in (ROOT / "benchmarks").rglob("*.py")} | {"models"}
    assert len(product) > 40 and len(beside) > 3
    assert sorted(listed_packages(tree)) == sorted(product | beside)


def test_the_checks_can_fail() -> None:
    text = "[importlinter:contract:layers]\nlayers =\n    a\n    b | c\n"
    assert contract_rows(text) == [{"a"}, {"b", "c"}]
    assert drawn_rows("a      on top\n\nc\nb\n", {"a", "b", "c"}) == [{"a"}, {"c"}, {"b"}]
    assert listed_packages("a/   x\n  b/ y\n    c/  z\n  d/ y\ne/ x") == ["a", "a/b", "a/b/c", "a/d", "e"]
    with pytest.raises(ValueError, match="no folder with a text: 'a/'"):
        listed_packages("a/")
