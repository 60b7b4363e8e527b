"""Kernels on disk: one process compiles, all run the same loaded code, and no source ever gets another's code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 300
CALLED = """
import numba
FACTOR = 3
@numba.njit(no_cpython_wrapper=True)
def times(x):
    return x * FACTOR
"""
CALLING = """
from diptych.kernels.cache import cached
from called import times
def add(x, y):
    return times(x) + y
add = cached(add)
"""
RUN = """
import logging
logging.basicConfig(level="INFO")
from calling import add
print(add(2, 1), add(2.0, 1.0))
"""


def write_source(folder: Path) -> Path:
    """A folder with a kernel that calls a function of another module."""
    folder.mkdir()
    (folder / "called.py").write_text(CALLED)
    (folder / "calling.py").write_text(CALLING)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the kernels of a clone of `source`, for integers and for floats."""
    folder = tmp_path_factory.mktemp("compiled")
    assert ended(start(write_source(folder / "clone"), folder / "cache")) == ("7 7.0", 2)
    return folder / "cache"


@pytest.fixture
def cache(compiled: Path, tmp_path: Path) -> Path:
    """A copy of `compiled`."""
    return shutil.copytree(compiled, tmp_path / "cache")


def start(source: Path, cache: Path, code: str = RUN, user: int | None = None) -> subprocess.Popen[str]:
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{source}", "NUMBA_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-B", "-c", code],
        env=os.environ | paths,
        cwd=source,
        user=user,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, int]:
    """What a process printed, and how many kernels were compiled for it."""
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return out.strip(), errors.count("compiled calling.add")


def test_of_two_processes_that_start_at_once_one_compiles(source: Path, tmp_path: Path) -> None:
    processes = [start(source, tmp_path / "cache") for _ in range(2)]
    results = [ended(process) for process in processes]
    assert [out for out, _ in results] == ["7 7.0", "7 7.0"]
    assert sum(compiled for _, compiled in results) == 2  # one for integers, one for floats


def test_a_clone_loads_what_another_compiled(source: Path, cache: Path) -> None:
    os.utime(source / "calling.py", (1, 1))
    assert ended(start(source, cache)) == ("7 7.0", 0)


def test_a_kernel_is_compiled_again_when_what_it_calls_has_changed(source: Path, cache: Path) -> None:
    (source / "called.py").write_text(CALLED.replace("FACTOR = 3", "FACTOR = 5"))
    assert ended(start(source, cache)) == ("11 11.0", 2)


# What a kernel takes in besides functions of its own module: another module by its name, constants of another, and
# options, its own and those of a function that it calls.
SOURCES = {
    "called.py": CALLED + "PAIR = (3, (1, 2))\n",
    "compiling.py": """
import numba
from diptych.kernels.cache import cached
OPTIONS = {"fastmath": {"reassoc", "contract"}}
def jit(function):
    return cached(function, **OPTIONS)
""",
    "calling.py": """
from compiling import jit
from package import named
from called import PAIR
def add(x, y):
    return named.FACTOR * x + y + PAIR[1][0]
add = jit(add)
""",
    "package/__init__.py": "",
    "package/named.py": "FACTOR = 3\n",
}


def test_what_kernels_take_in_makes_them_new(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name, text in SOURCES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    ours = "from diptych.kernels import cache\ncache.OWN_PACKAGES = cache.OWN_PACKAGES | {'package'}\n"
    assert ended(start(source, tmp_path / "cache", ours + RUN)) == ("8 8.0", 2)
    assert ended(start(source, tmp_path / "cache", ours + RUN)) == ("8 8.0", 0)
    for name, old, new, expected in (
        ("package/named.py", "FACTOR = 3", "FACTOR = 5", "12 12.0"),
        ("called.py", "(1, 2)", "(2, 2)", "13 13.0"),
        ("compiling.py", '"contract"', '"nsz"', "13 13.0"),
        ("compiling.py", "import numba", "import numba  # changed", "13 13.0"),
    ):
        (source / name).write_text((source / name).read_text().replace(old, new))
        assert ended(start(source, tmp_path / "cache", ours + RUN)) == (expected, 2), (name, new)


LOADED = """
from calling import add
from diptych.kernels.cache import is_stored, load_stored
print(is_stored(add), len(add.signatures), end=" ")
load_stored(add)
print(len(add.signatures), is_stored(len))
"""


def test_kernels_on_disk_are_known_and_loaded_without_a_call(
    source: Path, cache: Path, tmp_path: Path
) -> None:
    assert ended(start(source, cache, LOADED)) == ("True 0 2 True", 0)
    assert ended(start(source, tmp_path / "empty", LOADED)) == ("False 0 0 True", 0)
    (index,) = cache.glob("*/*/*.nbi")
    os.truncate(index, 40)
    assert ended(start(source, cache, LOADED)) == ("False 0 0 True", 0)


# ---- nothing ends a start


def failing(where: str, what: str, errno: str) -> str:
    """Code with which calls of one function fail."""
    return f"""
import errno, os, {where.partition(".")[0]}, numba.core.caching
def fail(*_):
    raise OSError(errno.{errno}, os.strerror(errno.{errno}))
{where}.{what} = fail
"""


REMOVED = "import calling, os, shutil\nshutil.rmtree(os.environ['NUMBA_CACHE_DIR'])\n"
CHILDREN_IGNORED = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"


@pytest.mark.parametrize(
    "fault",
    [
        failing("fcntl", "flock", "ENOLCK"),
        failing("os", "fork", "EAGAIN"),
        failing("os", "pipe", "EMFILE"),
        failing("numba.core.caching.IndexDataCacheFile", "_save_data", "ENOSPC"),
        failing("numba.core.caching.IndexDataCacheFile", "_load_index", "EIO"),
        REMOVED,
    ],
    ids=["lock", "fork", "files", "disk", "read", "removed"],
)
def test_what_the_system_refuses_costs_time_only(source: Path, tmp_path: Path, fault: str) -> None:
    process = start(source, tmp_path / "cache", fault + RUN)
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out.strip()) == (0, "7 7.0"), errors
    assert errors.count("this process compiles kernels") == 1


def test_where_the_ends_of_children_are_ignored_kernels_are_kept_all_the_same(
    source: Path, tmp_path: Path
) -> None:
    assert ended(start(source, tmp_path / "cache", CHILDREN_IGNORED + RUN)) == ("7 7.0", 2)
    assert ended(start(source, tmp_path / "cache")) == ("7 7.0", 0)


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("length", [0, 40])
def test_damaged_files_are_made_again(source: Path, cache: Path, kind: str, length: int) -> None:
    files = list(cache.glob(f"*/*/*.{kind}"))
    assert files
    for file in files:
        os.truncate(file, length)
    assert ended(start(source, cache)) == ("7 7.0", 2)
    assert ended(start(source, cache)) == ("7 7.0", 0)


def test_kernels_are_plain_functions_where_numba_must_not_compile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert ended(start(source, tmp_path / "cache")) == ("7 7.0", 0)


# ---- whom it trusts


@pytest.mark.parametrize("which", ["machine", "cache", "around"])
def test_a_folder_that_others_may_write_to_is_not_used(
    source: Path, compiled: Path, tmp_path: Path, which: str
) -> None:
    cache = shutil.copytree(compiled, tmp_path / "around" / "cache")
    (machine,) = cache.iterdir()
    {"machine": machine, "cache": cache, "around": tmp_path / "around"}[which].chmod(0o777)
    process = start(source, cache)
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert out.strip() == "7 7.0" and "every process compiles its own kernels" in errors


def test_a_folder_inside_one_of_somebody_else_is_not_used(source: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give folders away")
    around = tmp_path / "around"
    around.mkdir()
    os.chown(around, 65534, 65534)
    out, errors = start(source, around / "cache").communicate(timeout=PATIENCE_S)
    assert out.strip() == "7 7.0" and "belongs to somebody else" in errors


def test_kernels_that_nobody_uses_are_removed(source: Path, cache: Path) -> None:
    def grow_old() -> Path:
        (folder,) = cache.glob("*/calling-*")
        os.utime(folder, (1, 1))
        return folder

    used = grow_old()
    assert ended(start(source, cache))[1] == 0
    assert used.stat().st_mtime > 1
    unused = grow_old()
    (cache / "of others").mkdir()
    os.utime(cache / "of others", (1, 1))
    (source / "called.py").write_text(CALLED.replace("FACTOR = 3", "FACTOR = 5"))
    assert ended(start(source, cache)) == ("11 11.0", 2)
    assert not unused.exists() and (cache / "of others").exists()


# ---- of several processes, one may die or stand still


STUCK = """
import pathlib, time
from diptych.kernels import cache
def save_overload(cache, *_):
    if not cache._is_child:
        return
    pathlib.Path("compiling").write_text("")
    time.sleep(1000)
cache._KernelCache.save_overload = save_overload
"""


def test_one_that_dies_while_it_compiles_holds_up_nobody(source: Path, tmp_path: Path) -> None:
    process = start(source, tmp_path / "cache", STUCK + RUN)
    seen = threading.Event()
    while not (source / "compiling").exists():
        assert process.poll() is None
        seen.wait(0.05)
    process.kill()  # its child, which holds the lock, has to end with it
    process.communicate(timeout=PATIENCE_S)
    assert ended(start(source, tmp_path / "cache")) == ("7 7.0", 2)


SHORT = "from diptych.kernels import cache\ncache.MAX_COMPILE_S = 1.0\n"


def test_one_that_stands_still_while_it_compiles_holds_up_nobody_for_long(
    source: Path, tmp_path: Path
) -> None:
    process = start(source, tmp_path / "cache", STUCK + RUN)
    seen = threading.Event()
    while not (source / "compiling").exists():
        assert process.poll() is None
        seen.wait(0.05)
    process.send_signal(signal.SIGSTOP)
    try:
        other = start(source, tmp_path / "cache", SHORT + RUN)
        out, errors = other.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    assert out.strip() == "7 7.0" and "is held for more than 1 s" in errors


def test_a_child_that_stands_still_is_ended(source: Path, tmp_path: Path) -> None:
    process = start(source, tmp_path / "cache", STUCK + SHORT + RUN)
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert out.strip() == "7 7.0" and "ended with status 9" in errors


def test_a_child_that_cannot_compile_is_reported_and_this_process_compiles(
    source: Path, tmp_path: Path
) -> None:
    broken = "import os\nos.register_at_fork(after_in_child=lambda: os._exit(7))\n"
    process = start(source, tmp_path / "cache", broken + RUN)
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert out.strip() == "7 7.0" and "ended with status" in errors


def test_loading_kernels_loads_no_linear_algebra(source: Path, tmp_path: Path) -> None:
    code = RUN + "import sys\nprint('scipy.linalg' in sys.modules)\nimport scipy.linalg.cython_blas\n"
    assert ended(start(source, tmp_path / "cache", code))[0] == "7 7.0\nFalse"
