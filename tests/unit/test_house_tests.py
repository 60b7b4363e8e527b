"""The house of tests and benchmarks is in order: who imports whom, and that all lists of packages are one.

Rules are those of CONTRIBUTING, "Checks". Programs that a test hands to Python as a text count like files.
"""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
from collections.abc import Iterator

from diptych.launch import own_packages
from tests.support.product_trees import PACKAGES, ROOT, WHEEL_PACKAGES, called_name, dotted, parsed_files

IMPORT_LINE = re.compile(r"^\s*((?:from [\w.]+ )?import [\w., ]+?)\s*(?:[;#].*)?$", re.MULTILINE)
SUPPORT, OF_BENCHMARKS = "tests.support", "tests.unit.benchmarks"


def imported_names(tree: ast.AST) -> Iterator[str]:
    """All that a module imports, also in texts and by `import_module`: modules, and names with their module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and called_name(node) == "import_module":
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value:
            for line in IMPORT_LINE.findall(node.value):
                yield from _names_of_line(line)


def _names_of_line(line: str) -> Iterator[str]:
    """The names that one line of a text imports; none if it is a sentence."""
    try:
        tree = ast.parse(line)
    except SyntaxError:
        return
    yield from imported_names(tree)


def is_below(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of these packages, or in one."""
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def imports_a_test(_: str, name: str) -> bool:
    """Whether a test file is imported, or something from one."""
    return is_below(name, "tests") and ".test_" in name


def imports_unshared(module: str, name: str) -> bool:
    """Whether a benchmark imports more of tests than what is shared, or the shared part more than itself."""
    if is_below(module, "benchmarks"):
        return is_below(name, "tests") and not is_below(name, SUPPORT)
    return is_below(module, SUPPORT) and is_below(name, "benchmarks", "tests") and not is_below(name, SUPPORT)


def imports_a_benchmark(module: str, name: str) -> bool:
    """Whether a test imports a benchmark, but for those whose folder is there for it."""
    return is_below(name, "benchmarks") and not is_below(module, "benchmarks", OF_BENCHMARKS)


def test_tests_and_benchmarks_import_only_what_they_may() -> None:
    count, broken = 0, set[tuple[str, str, str]]()
    for path, tree in parsed_files("tests", "benchmarks"):
        count += 1
        broken |= {
            (rule.__name__, str(path), name)
            for name in imported_names(tree)
            for rule in (imports_a_test, imports_unshared, imports_a_benchmark)
            if rule(dotted(path), name)
        }
    assert count > 500 and broken == set()


def package_lists() -> Iterator[tuple[str, set[str]]]:
    """Every list of the product's packages, by its place. Contracts leave `models` out, which gets its place here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = project["tool"]["ruff"]["lint"]["isort"]["known-first-party"]
    yield "ruff", set(known) - {"benchmarks", "tests"}
    yield "folders", {file.parent.name for file in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests"}
    yield "import path", set(own_packages.PACKAGES)
    yield "image", set(image_folders((ROOT / ".dockerignore").read_text(encoding="utf-8")))
    yield "deploy/install.sh", compiled_packages((ROOT / "deploy/install.sh").read_text(encoding="utf-8"))
    yield "house", {*PACKAGES, "models"}
    for name, packages in contract_packages((ROOT / ".importlinter").read_text(encoding="utf-8")):
        yield f".importlinter, {name}", packages | {"models"}


def image_folders(ignored: str) -> Iterator[str]:
    """The folders that `.dockerignore` lets into the image."""
    names = (line[1:] for line in ignored.splitlines() if line.startswith("!"))
    return (name for name in names if (ROOT / name).is_dir())


def compiled_packages(script: str) -> set[str]:
    """The packages whose files an installation compiles."""
    [names] = re.findall(r" -m compileall -q ([\w ]+?) >>", script)
    return set(names.split())


def contract_packages(text: str) -> Iterator[tuple[str, set[str]]]:
    """The lists in the contracts that are about all packages."""
    contracts = configparser.ConfigParser()
    contracts.read_string(text)
    lists = {
        "roots": contracts["importlinter"]["root_packages"],
        "layers": contracts["importlinter:contract:layers"]["layers"],
        "product": contracts["importlinter:contract:product"]["source_modules"],
        "diptych": "diptych" + contracts["importlinter:contract:diptych"]["forbidden_modules"],
    }
    for name, listed in lists.items():
        yield name, set(re.findall(r"\w+", listed)) - {"torch", "ray"}


def test_all_lists_of_packages_are_that_of_the_wheel() -> None:
    lists = dict(package_lists())
    assert len(lists) == 10
    assert {place: names for place, names in lists.items() if names != set(WHEEL_PACKAGES)} == {}


def test_imports_are_seen_in_texts_too() -> None:
    program = "P = '''from a import b  # why\nprint(1)'''\nimport a.c\n"
    assert set(imported_names(ast.parse(program))) == {"a.b", "a.c"}
    sentence = "P = '''What it does.\n\nfrom here on, import a b'''\n"
    assert list(imported_names(ast.parse(sentence))) == []
    assert list(imported_names(ast.parse("importlib.import_module('a.c')"))) == ["a.c"]


def test_the_rules_for_imports_can_fail() -> None:
    assert imports_a_test("tests.unit.test_a", "tests.unit.test_b.VALUE")
    assert imports_a_test("benchmarks.a", "tests.system.test_b")
    assert not imports_a_test("tests.unit.test_a", "tests.unit.samples.make_data")
    assert imports_unshared("benchmarks.load.a", "tests.unit.b.c")
    assert imports_unshared("tests.support.a", "tests.system.b.c")
    assert imports_unshared("tests.support.a", "benchmarks.b")
    assert not imports_unshared("benchmarks.a", "tests.support.b.c")
    assert imports_a_benchmark("tests.unit.planner.test_a", "benchmarks.b")
    assert not imports_a_benchmark("tests.unit.benchmarks.test_a", "benchmarks.b.c")


def test_the_lists_are_read_as_they_are() -> None:
    assert compiled_packages("python -m compileall -q a b_c >> log") == {"a", "b_c"}
    assert list(image_folders("*\n!README.md\n!router\n!nowhere\n")) == ["router"]
    contracts = "[importlinter]\nroot_packages =\n    a\n    b\n"
    for name, field in (
        ("layers", "layers"),
        ("product", "source_modules"),
        ("diptych", "forbidden_modules"),
    ):
        contracts += f"[importlinter:contract:{name}]\n{field} =\n    a | c\n    ray\n"
    found = dict(contract_packages(contracts))
    assert found["roots"] == {"a", "b"} and found["layers"] == found["product"] == {"a", "c"}
    assert found["diptych"] == {"diptych", "a", "c"}
