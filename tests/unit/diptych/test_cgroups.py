"""No more memory is planned with than this process's control groups leave to it, wherever the limit is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from diptych.cgroups import available_memory_bytes

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
NO_LIMIT = "9223372036854771712"  # what version 1 says
V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


def group(folder: Path, names: tuple[str, str], limit: str, used: int, stat: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip((*names, "memory.stat"), (limit, str(used), stat), strict=True):
        (folder / name).write_text(text)


def left(top: Path, member: str) -> int | None:
    (top / "self").write_text(member)
    return available_memory_bytes(top, top / "self")


def test_the_least_of_all_levels_counts_in_version_2(tmp_path: Path) -> None:
    group(tmp_path / "slice", V2, "500", 200)
    group(tmp_path / "slice" / "part.service", V2, "400", 50)
    group(tmp_path / "slice" / "part.service" / "inner", V2, "max", 10)
    assert left(tmp_path, "0::/slice/part.service/inner\n") == 300
    assert left(tmp_path, "0::/slice/part.service\n") == 300
    group(tmp_path / "slice", V2, "max", 200)
    assert left(tmp_path, "0::/slice/part.service/inner\n") == 350


def test_the_least_of_all_levels_counts_in_version_1(tmp_path: Path) -> None:
    group(tmp_path / "memory", V1, NO_LIMIT, 900)
    group(tmp_path / "memory" / "a", V1, "500", 200)
    group(tmp_path / "memory" / "a" / "b", V1, "1000", 50)
    assert left(tmp_path, "7:cpu:/\n4:memory:/a/b\n0::/\n") == 300


def test_a_container_that_is_named_as_its_host_names_it(tmp_path: Path) -> None:
    group(tmp_path, V2, "400", 100)
    assert left(tmp_path, "0::/docker/0123\n") == 300
    group(tmp_path / "part", V2, "200", 100)
    assert left(tmp_path, "0::/docker/0123/part\n") == 100
    assert left(tmp_path, "0::/../other\n") == 300


def test_files_that_the_kernel_can_give_up_count_as_free(tmp_path: Path) -> None:
    group(tmp_path, V2, "400", 300, "anon 100\ninactive_file 150\n")
    assert left(tmp_path, "0::/\n") == 250
    group(tmp_path / "memory", V1, "400", 390, "inactive_file 1\ntotal_inactive_file 100\n")
    assert left(tmp_path, "4:memory:/\n") == 110


def test_without_a_limit_nothing_is_reported(tmp_path: Path) -> None:
    assert left(tmp_path, "0::/\n") is None
    group(tmp_path, V2, "max", 300)
    assert left(tmp_path, "0::/\n") is None
    assert available_memory_bytes(tmp_path, tmp_path / "missing") is None


AVAILABLE = """
import pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
from engine.model.memory_plan import available_memory
print(available_memory())
"""


def test_a_worker_in_a_limited_group_plans_within_it(memory_group: Path) -> None:
    command = [sys.executable, "-c", AVAILABLE, str(memory_group)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert 0 <= int(result.stdout) <= 128 * MIB


POPULATE = """
import pathlib, sys, threading
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
from kvtransfer.shared_memory import SharedMemory
from worker.prefault import PoolPrefault
populating = PoolPrefault([SharedMemory(512 << 20)])
populating.start()
for thread in threading.enumerate():
    if thread.name == "populate":
        thread.join()
print("alive")
"""


def test_a_pool_larger_than_its_group_is_not_populated_to_death(memory_group: Path) -> None:
    command = [sys.executable, "-c", POPULATE, str(memory_group)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout) == (0, "alive\n"), result.stderr
