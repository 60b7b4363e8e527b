"""Typed names say what their class says, classes are small, and documents are short.

A name whose type is a class of the product shares a word with it: `pair: ChosenPair`, not `choice: ChosenPair`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.product_trees import PACKAGES, ROOT, product_nodes

MIN_SHARED = 0.95
MAX_METHOD_LINES = 250  # of a class, docstrings left out
MAX_WORDS, MAX_PAGE_WORDS, MAX_README_WORDS = 42_000, 3_000, 900
# Names that say the part that a value plays beside another one of its class.
ROLES = frozenset({
    "source", "target", "left", "right", "before", "after", "first", "second", "now", "then", "prefill", "decode",
    "keys", "values", "parent", "other", "others", "running", "waiting", "adopted", "event", "effect",
    "message", "messages",
})  # fmt: skip
# Of these containers, what a name says is their key or their use.
MAPPINGS = frozenset(
    {"Callable", "Literal", "type", "Annotated", "dict", "Mapping", "defaultdict", "OrderedDict", "tuple"}
)
# Written by `make docs`.
GENERATED_PAGE = ROOT / "docs" / "configuration.md"
TABLE = re.compile(r"<!-- table:.*?<!-- end -->", re.DOTALL)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def words_of(name: str) -> set[str]:
    """The words of a name, in lower case; of a plural also the singular, and `sequence` for `seq`."""
    found = {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}
    singular = {word[:-3] + "y" for word in found if word.endswith("ies")}
    singular |= {word[:-2] for word in found if word.endswith("es")}
    singular |= {word[:-1] for word in found if word.endswith("s")}
    return found | singular | ({"sequence"} if found & {"seq", "seqs"} else set())


def classes_in(annotation: ast.expr, classes: frozenset[str]) -> set[str]:
    """Which of `classes` an annotation names, as a value or as what a list, set or option of them holds."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.Subscript):
        container = ast.unparse(annotation.value).rpartition(".")[2]
        if container in MAPPINGS:
            return set()
    nodes = list(ast.walk(annotation))
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    return (named | {node.attr for node in nodes if isinstance(node, ast.Attribute)}) & classes


def typed_names(nodes: list[ast.AST], classes: frozenset[str]) -> Iterator[tuple[int, str, set[str]]]:
    """Parameters, fields and typed locals whose type is one of `classes`: line, name, classes."""
    foreign = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in PACKAGES
        for alias in node.names
    }
    ours = classes - foreign
    for node in nodes:
        if isinstance(node, Function):
            given = node.args
            for one in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                if one.annotation is not None and (found := classes_in(one.annotation, ours)):
                    yield one.lineno, one.arg, found
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name | ast.Attribute):
            name = node.target.id if isinstance(node.target, ast.Name) else node.target.attr
            if found := classes_in(node.annotation, ours):
                yield node.lineno, name, found


def shares_word(name: str, classes: set[str]) -> bool | None:
    """Whether a name shares a word with one of its classes; None if it says a part that it plays."""
    words = words_of(name)
    return None if words & ROLES else any(words & words_of(cls) for cls in classes)


def method_lines(cls: ast.ClassDef) -> int:
    """The lines of the methods of a class, without their docstrings."""
    total = 0
    for method in cls.body:
        if isinstance(method, Function) and method.end_lineno is not None:
            first = min([method.lineno, *(one.lineno for one in method.decorator_list)])
            total += method.end_lineno - first + 1
            if ast.get_docstring(method) is not None and (end := method.body[0].end_lineno) is not None:
                total -= end - method.body[0].lineno + 1
    return total


def words_by_hand(text: str) -> int:
    """The words of a page that no program has written."""
    return len(TABLE.sub("", text).split())


def test_typed_names_share_a_word_with_their_class() -> None:
    classes = frozenset(
        node.name for nodes in product_nodes().values() for node in nodes if isinstance(node, ast.ClassDef)
    )
    found = [
        (shares_word(name, named), f"{path}:{line} {name}: {', '.join(sorted(named))}")
        for path, nodes in product_nodes().items()
        for line, name, named in typed_names(nodes, classes)
    ]
    counted = [shares for shares, _ in found if shares is not None]
    assert len(counted) > 3000
    assert sum(counted) / len(counted) >= MIN_SHARED, [place for shares, place in found if shares is False]


def test_classes_are_small() -> None:
    sizes = {
        f"{path}:{node.name}": method_lines(node)
        for path, nodes in product_nodes().items()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    assert {place: size for place, size in sizes.items() if size > MAX_METHOD_LINES} == {}


def test_documents_are_short() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    counts = {
        page: words_by_hand(page.read_text(encoding="utf-8")) for page in pages if page != GENERATED_PAGE
    }
    assert len(counts) > 25 and counts[ROOT / "README.md"] <= MAX_README_WORDS
    assert {page: count for page, count in counts.items() if count > MAX_PAGE_WORDS} == {}
    assert sum(counts.values()) <= MAX_WORDS


def test_the_rules_can_fail() -> None:
    tree = ast.parse(
        "class ChosenPair:\n"
        "  def f(self, choice: 'ChosenPair | None', pairs: list[ChosenPair]):\n    'Docs.'\n    x: int = 1\n"
        "def g(before: ChosenPair, by_name: dict[str, ChosenPair]): pass\n"
    )
    found = {
        name: shares_word(name, named)
        for _, name, named in typed_names([*ast.walk(tree)], frozenset({"ChosenPair"}))
    }
    assert found == {"choice": False, "pairs": True, "before": None}
    (cls, _) = tree.body
    assert isinstance(cls, ast.ClassDef) and method_lines(cls) == 2
    assert words_by_hand("a b\n<!-- table: x -->\n| 1 | 2 |\n<!-- end -->\nc") == 3
