"""One test per published fault of other servers that concerns the routes of clients: `cve_tests` of them.

python -m tests.unit.test_advisories
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ADVISORY = re.compile(r"(cve|pysec)[-_](\d{4})[-_](\d{4,7})", re.IGNORECASE)
# Those of the ledger that concern what a client may send, by what they were about.
CONCERNING: dict[str, set[str]] = {
    "keys and paths": {
        "CVE-2026-48710", "CVE-2026-48746", "CVE-2026-49468", "CVE-2026-23996", "CVE-2025-59425", "CVE-2025-62593",
    },
    "one request ends the server": {
        "CVE-2026-34756", "CVE-2026-114051", "CVE-2026-116173", "CVE-2026-105757", "CVE-2026-105756",
        "CVE-2026-105922", "CVE-2026-115911", "CVE-2026-115918", "CVE-2026-22773", "CVE-2025-48956", "CVE-2025-48944",
        "CVE-2025-62426", "CVE-2025-29770", "PYSEC-2026-2303", "CVE-2026-112266",
    },
    "what clients say of transfers": {
        "CVE-2026-94622", "CVE-2026-94623", "CVE-2026-94626", "CVE-2026-94627", "CVE-2026-105754", "CVE-2026-116176",
        "CVE-2026-92972", "CVE-2026-26220", "CVE-2026-65119",
    },
    "memory and code through inputs": {
        "CVE-2025-62164", "CVE-2026-56340", "CVE-2026-73557", "CVE-2026-22778", "CVE-2026-54236", "CVE-2026-114053",
        "CVE-2026-7304",
    },
    "grammars": {"CVE-2025-32381", "CVE-2025-58446", "CVE-2026-25048"},
    "shared prefixes": {"CVE-2025-46570"},
    "HTTP": {"CVE-2025-62727", "CVE-2025-43859"},
}  # fmt: skip


def advisories_in(text: str) -> set[str]:
    """The ids in a text, however they are written."""
    return {f"{kind.upper()}-{year}-{number}" for kind, year, number in ADVISORY.findall(text)}


def list_tested() -> dict[str, str]:
    """Each advisory that a test names in its own name, its parameters or its first line, and that test."""
    found: dict[str, str] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if ADVISORY.search(text) is None:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                said = (ast.get_docstring(node) or "").partition("\n")[0]
                decorators = " ".join(ast.unparse(one) for one in node.decorator_list)
                for name in advisories_in(f"{node.name} {said} {decorators}"):
                    found.setdefault(name, f"{file.relative_to(TESTS)}::{node.name}")
    return found


def count_tests() -> int:
    """How many of the advisories that concern clients have a test."""
    return len(set().union(*CONCERNING.values()) & list_tested().keys())


def test_each_advisory_has_its_test() -> None:
    tested = list_tested()
    assert {name for names in CONCERNING.values() for name in names} - tested.keys() == set()
    assert count_tests() >= 40


if __name__ == "__main__":
    print(f"cve_tests={count_tests()}")
