"""The house is in order: names that can be found, small functions and files, no import circles, nothing left over.

Bounds are those of CONTRIBUTING, "House rules". What counts is the product, not tests and benchmarks.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.support.product_trees import PACKAGES, ROOT, called_name, dotted, product_nodes, trees

MIN_WORDS = 1.5  # per function name, on average
MAX_SHARED_CLASS_NAMES = 10
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 450
MAX_FILES = 15  # per folder
MIN_DOCUMENTED = 0.95
OUR_FOLDERS = (*PACKAGES, "benchmarks", "models", "tests")
# Each has had several meanings here, where the field has a word for each.
BANNED_WORDS = {
    "told", "turn", "heard", "crew", "judge", "judged", "verdict", "verdicts", "brain", "gentle",
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


def words_of(name: str) -> list[str]:
    """The words of a name, in either spelling."""
    return re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)


def num_words(name: str) -> int:
    """How many words a name has."""
    return len(words_of(name))


def has_banned(name: str) -> bool:
    """Whether the letters of a banned word are in a name."""
    return any(word in name.lower() for word in BANNED_WORDS)


def banned_names(text: str) -> set[str]:
    """The names in Python code that have a banned word."""
    found = set(re.findall(r"[A-Za-z_]\w*", text))  # those of comments and strings, too
    if all(BANNED_WORDS.isdisjoint(map(str.lower, words_of(name))) for name in found if has_banned(name)):
        return set()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME}
    return {name for name in names if not BANNED_WORDS.isdisjoint(map(str.lower, words_of(name)))}


def functions() -> Iterator[tuple[Path, Function]]:
    """All functions and methods."""
    for path, nodes in product_nodes().items():
        yield from ((path, node) for node in nodes if isinstance(node, Function))


def public_functions() -> Iterator[tuple[str, Function]]:
    """Functions and methods that others may call, by place; overrides and property setters are left out."""

    def within(path: Path, body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from within(path, node.body, f"{prefix}{node.name}.")
            elif isinstance(node, Function) and not node.name.startswith("_"):
                decorators = {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list}
                if not decorators & {"override", "overload", "setter"}:
                    yield f"{path}:{prefix}{node.name}", node

    for path, tree in trees().items():
        yield from within(path, tree.body, "")


def raised(function: Function) -> set[str]:
    """The classes that the function itself raises."""
    found, todo = set[str](), list[ast.AST](function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            cls = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(cls, ast.Name) and cls.id[0].isupper():
                found.add(cls.id)
        todo += ast.iter_child_nodes(node)
    return found - {"AssertionError", "NotImplementedError", "StopIteration"}


def imported(path: Path, nodes: Iterable[ast.AST]) -> set[str]:
    """Modules of the product that a module imports at any time, also by name."""
    found, calls = set[str](), list[ast.AST]()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Call):
            calls.append(node)
    found |= imported_by_name(calls)
    return {name for name in found if name in modules() and name != dotted(path)}


def imported_by_name(nodes: Iterable[ast.AST]) -> set[str]:
    """Modules of the product that calls of `import_module` may mean; what an f-string fills in may be anything."""
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.Call) and node.args and called_name(node) == "import_module":
            pattern = _module_pattern(node.args[0])
            found |= {name for name in modules() if re.fullmatch(pattern, name)}
    return found


def _module_pattern(name: ast.expr) -> str:
    """A pattern of the names that an expression may have; of none if it is neither a constant nor an f-string."""
    parts = name.values if isinstance(name, ast.JoinedStr) else [name]
    texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
    if not any(texts):
        return ""
    return "".join(r"[\w.]+" if text is None else re.escape(str(text)) for text in texts)


def circular(edges: Mapping[str, set[str]]) -> list[str]:
    """The modules that import each other in circles, and all that lie between two circles."""
    left = dict(edges)
    for needs_of in (_needs, _needed_by):
        while ends := [name for name in left if not needs_of(name, left)]:
            for name in ends:
                del left[name]
    return sorted(left)


def _needs(name: str, left: Mapping[str, set[str]]) -> set[str]:
    return left[name] & left.keys()


def _needed_by(name: str, left: Mapping[str, set[str]]) -> set[str]:
    return {other for other, needs in left.items() if name in needs}


@cache
def module_edges() -> Mapping[str, set[str]]:
    """What each module of the product imports."""
    return {dotted(path): imported(path, nodes) for path, nodes in product_nodes().items()}


@cache
def modules() -> frozenset[str]:
    """The names of all modules of the product that are not empty packages."""
    return frozenset(dotted(path) for path, tree in trees().items() if tree.body)


def test_function_names_have_words() -> None:
    names = [node.name for _, node in functions() if not node.name.startswith("__")]
    assert sum(map(num_words, names)) / len(names) >= MIN_WORDS


def test_banned_words_are_in_no_name() -> None:
    files = [file for folder in OUR_FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 700
    found = {
        str(file.relative_to(ROOT)): names
        for file in files
        if (names := banned_names(file.read_text(encoding="utf-8")))
    }
    assert found == {}
    assert [file for file in files if not BANNED_WORDS.isdisjoint(words_of(file.stem))] == []


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict[str, list[Path]](list)
    for path, nodes in product_nodes().items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert len(shared) <= MAX_SHARED_CLASS_NAMES, shared


def test_functions_and_files_are_small() -> None:
    long = [
        f"{path}:{node.name}"
        for path, node in functions()
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    large = [
        path for path in trees() if (ROOT / path).read_text(encoding="utf-8").count("\n") > MAX_FILE_LINES
    ]
    assert (long, large) == ([], [])


def test_folders_are_small() -> None:
    folders = Counter(path.parent for path in trees() if path.name != "__init__.py")
    assert [folder for folder, count in folders.items() if count > MAX_FILES] == []


def test_public_functions_are_documented() -> None:
    everything = list(public_functions())
    without = [place for place, node in everything if ast.get_docstring(node) is None]
    assert len(without) <= (1 - MIN_DOCUMENTED) * len(everything), without
    silent = [
        place
        for place, node in everything
        if raised(node) and "Raises" not in (ast.get_docstring(node) or "")
    ]
    assert silent == []


def test_no_module_imports_itself_in_a_circle() -> None:
    """Neither when it is imported, nor later, nor for types only."""
    assert circular({name: needs for name, needs in module_edges().items() if name in modules()}) == []


def test_one_module_imports_upwards_by_name() -> None:
    """`.importlinter` does not see such imports. The entry point checks all packages, and imports the commands then."""
    upwards = [
        (str(path), name)
        for path, nodes in product_nodes().items()
        for name in imported_by_name(nodes)
        if PACKAGES.index(name.partition(".")[0]) > PACKAGES.index(path.parts[0])
    ]
    assert upwards == [("diptych/launch/entry.py", "services.cli.main")]


def test_planner_and_router_are_all_in_use() -> None:
    """Everything in them is reached from a service."""
    edges = dict[str, set[str]]()
    for path, nodes in product_nodes().items():
        named = {
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in modules()
        }
        edges[dotted(path)] = module_edges()[dotted(path)] | named
    seen, todo = set[str](), [name for name in modules() if name.startswith("services.")]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += edges.get(name, ())
    assert sorted(name for name in modules() - seen if name.startswith(("planner.", "router."))) == []


def test_the_rules_can_fail() -> None:
    assert num_words("take_HTTPRequest2") == 3 and num_words("_begin") == 1 and num_words("KvAllocator") == 2
    assert banned_names("def was_told(x): return Turn(x, no=1)  # told") == {"was_told", "Turn"}
    assert banned_names("self._judged, MAX_VERDICTS = verdict") == {"_judged", "MAX_VERDICTS", "verdict"}
    assert banned_names("returned = overturned('told')") == set()
    tree = ast.parse("def one():\n    def two():\n        raise KeyError\n    raise ValueError('x')")
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef) and raised(function) == {"ValueError"}


def test_imports_at_any_time_are_seen() -> None:
    source = """
def run():
    import router.effects
if TYPE_CHECKING:
    from engine.loop import Engine
importlib.import_module("services.cli.main")
import_module(f"services.cli.{name}.flags")
import_module(name)
"""
    found = imported(Path("planner/types.py"), ast.walk(ast.parse(source)))
    assert {"router.effects", "engine.loop", "services.cli.main", "services.cli.plan.flags"} < found
    assert all(name.startswith("services.cli.") for name in found - {"router.effects", "engine.loop"})
    assert "services.cli.main" in imported_by_name(ast.walk(ast.parse("import_module('services.cli.main')")))
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set[str](), "e": {"d", "c"}}
    assert circular(edges) == ["b", "c"] and circular({"a": {"b"}, "b": set()}) == []
