"""The text the embedded model learns from: the sources of Python's standard library.

Every Python installation carries them, so nothing is downloaded. `HELD_OUT` modules are never read for
training, neither as source nor through their docstrings; they are what bits per byte is measured on.
Synthetic recall documents are in `recall.py`.
"""

from __future__ import annotations

import ast
import inspect
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = frozenset(
    {
        "csv.py",
        "fractions.py",
        "graphlib.py",
        "heapq.py",
        "json/decoder.py",
        "json/encoder.py",
        "queue.py",
        "sched.py",
        "selectors.py",
        "shlex.py",
        "statistics.py",
        "string.py",
        "textwrap.py",
        "wave.py",
        "zipapp.py",
        "zoneinfo/_common.py",
    }
)

# Folders whose files are not used for training: some distributions lack their tests, and tables of characters and
# generated grammars teach nothing.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idle_test",
        "lib-dynload",
        "pgen2",
        "site-packages",
        "test",
        "tests",
    }
)
MAX_ANSWER_CHARS = 700

QUESTIONS = (
    "What does {} do?",
    "What is {}?",
    "Explain {}.",
    "Describe {} in a few words.",
    "How would you document {}?",
)


@dataclass(frozen=True, slots=True)
class SourceModule:
    """One source file; `name` is its path below the standard library, with forward slashes."""

    name: str
    text: str


def library_folder() -> Path:
    """The folder of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_wanted(name: str) -> bool:
    """Whether a file belongs to the corpus at all (either side of the split)."""
    parts = name.split("/")
    if SKIPPED_FOLDERS & set(parts[:-1]) or parts[0].startswith(("config-", "_sysconfigdata")):
        return False
    return not (parts[0] == "encodings" and parts[-1] not in ("__init__.py", "idna.py", "punycode.py"))


def read_modules(folder: Path | None = None) -> list[SourceModule]:
    """Every wanted module, sorted by name so that a seed means the same thing on every machine."""
    root = folder or library_folder()
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    modules = []
    for name in filter(is_wanted, names):
        text = (root / name).read_bytes().decode("utf-8", errors="ignore")
        if name == "pydoc_data/topics.py":
            text = language_reference(text)
        if text.strip():
            modules.append(SourceModule(name, text))
    return modules


def language_reference(source: str) -> str:
    """The language reference that pydoc carries as one dict of escaped strings, as prose."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return "\n\n".join(ast.literal_eval(node.value).values())
    return source


def split_held_out(modules: list[SourceModule]) -> tuple[list[SourceModule], list[SourceModule]]:
    """(training, held out)."""
    return (
        [module for module in modules if module.name not in HELD_OUT],
        [module for module in modules if module.name in HELD_OUT],
    )


def module_docstrings(module: SourceModule) -> list[tuple[str, str]]:
    """(dotted name, cleaned docstring) of the module and of what it defines; [] when it does not parse."""
    try:
        tree = ast.parse(module.text)
    except (SyntaxError, ValueError):
        return []
    base = module.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found: list[tuple[str, str]] = []

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text and len(text) > 20:
                found.append((name, inspect.cleandoc(text)))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(child, f"{name}.{child.name}")

    visit(tree, base)
    return found


def shorten_answer(text: str, limit: int = MAX_ANSWER_CHARS) -> str:
    """The leading paragraphs of `text` that fit in `limit` characters; at least part of the first."""
    kept = ""
    for paragraph in text.split("\n\n"):
        if kept and len(kept) + len(paragraph) + 2 > limit:
            break
        kept = f"{kept}\n\n{paragraph}" if kept else paragraph
    return kept[:limit].rstrip()


@dataclass(frozen=True, slots=True)
class ChatExchange:
    """A question and its answer, rendered by the caller with the chat template's own markers."""

    user: str
    assistant: str


def chat_exchanges(modules: list[SourceModule]) -> list[ChatExchange]:
    """One exchange per docstring; which wording asks is drawn from a fixed seed."""
    rng = random.Random(len(QUESTIONS))
    return [
        ChatExchange(rng.choice(QUESTIONS).format(name), shorten_answer(text))
        for module in modules
        for name, text in module_docstrings(module)
    ]
