"""What the documents name is there: metrics with type and labels, links, files, and the names in them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.unit.gateway.exported_metrics import documented, exported, render_tables

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\s]+)`")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|sh|md)")
HELD = re.compile(r"`(tests/[\w/]+\.py:\w+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Everything that is defined in a Python file: `name` at the top, `Class.name` within a class."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found |= names_of(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for child in node.body for name in names_of(child)}
    return frozenset(found)


def names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else getattr(node, "target", None)
    listed = targets if isinstance(targets, list) else [targets]
    return {name.id for target in listed if target for name in ast.walk(target) if isinstance(name, ast.Name)}


def missing(text: str) -> list[str]:
    """The spans of `text` that name a folder, a file, or something in a Python file, which is not there."""
    absent = []
    for span in SPAN.findall(FENCE.sub("", text)):
        path, _, name = span.partition(":")
        if path.startswith("/") or not (FILE.fullmatch(path) or re.fullmatch(r"[a-z_/]+/", path)):
            continue
        if not (ROOT / path).exists() or (name and name not in names_in(ROOT / path)):
            absent.append(span)
    return absent


def test_every_metric_is_documented_as_it_is() -> None:
    """But for those that the Prometheus client has of every process."""
    own = [name for name in exported() if not name.startswith(("process_", "python_"))]
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert sorted(documented(page)) == sorted(own), "name it in a table of docs/metrics.md, then `make docs`"
    assert render_tables(page) == page, "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if ":" not in link]
    assert [link for link in links if not (page.parent / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_every_name_is_there(page: Path) -> None:
    assert missing(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_every_page_begins_with_a_command(page: Path) -> None:
    parts = re.sub(r"<!--.*?-->\n*", "", page.read_text(encoding="utf-8"), flags=re.DOTALL).split("\n\n")
    assert parts[0].startswith("# ")
    assert re.match(r"    (diptych|python|make|curl) ", parts[1]), parts[1]


def unheld(text: str) -> list[str]:
    """The rows of tables of promises that name no test, by what fails."""
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ") and line.count("|") >= 6]
    return [row[1].strip() for row in rows if row[1].strip() != "What fails" and not HELD.search(row[5])]


def test_every_promise_is_held_by_a_test() -> None:
    text = (ROOT / "docs/failures.md").read_text(encoding="utf-8")
    assert unheld(text) == []
    assert len(HELD.findall(text)) > 60, "the tables are still read"


def test_the_checks_can_fail() -> None:
    relay = "router/requests/relay.py:Relay"
    text = f"`{relay}.handle_event` `router/none.py` `{relay}.none` `nowhere/` `/health`"
    assert missing(text) == ["router/none.py", "router/requests/relay.py:Relay.none", "nowhere/"]
    row = "| a fuse | it blows | nothing | at once | {} |"
    rows = [row.format(held) for held in ("-", "`tests/unit/test_docs.py:test_none`")]
    assert unheld("\n".join(rows)) == ["a fuse"]
    assert missing(rows[1]) == ["tests/unit/test_docs.py:test_none"]
    row = "| `diptych:ready` | counter | `x` | another meaning |\n"
    page = f"<!-- table: metrics -->\n{row}<!-- end -->\n{row}"
    assert documented(page) == ["diptych:ready"], "rows outside a table do not count"
    assert "| gauge |  | 1 if a canary" in render_tables(page)
