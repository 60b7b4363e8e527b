"""What all tests share: a skip is counted and says why; property tests try the same examples on every machine; files
that take long begin first.

`make soak` lets them look for new ones (`HYPOTHESIS_PROFILE=explore`).
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.memory_groups import MemoryGroup, MemoryGroupError

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Deployments of tests keep their files and batches in no folder of the user's.
DATA_HOME = tempfile.TemporaryDirectory(prefix="diptych-data-", ignore_cleanup_errors=True)
os.environ["XDG_DATA_HOME"] = DATA_HOME.name

# More test processes than cores: libraries that compute with two threads each would wait for each other, and spin.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

TESTS = Path(__file__).parent
# Half a minute and more with no kernels on disk, the longest first: no long one should be left alone at the end.
LONG = (
    "system/test_parallel.py", "engine/cpu/test_coded_attention.py", "engine/cpu/eviction/test_kept_frames.py",
    "engine/cpu/test_coded_kernels.py", "system/test_coded_serving.py", "system/test_emulated_device.py",
    "unit/planner/sim/test_same_decisions.py", "engine/gpu/test_emulated_device.py", "system/test_tokens.py",
    "system/test_cluster.py", "system/test_schema_fuzz.py", "system/test_replan.py", "system/test_profile.py",
    "system/test_keep_serving.py", "system/test_serve.py", "system/test_death.py",
    "unit/diptych/test_kernel_cache.py", "system/test_first_start.py", "simulation/test_bulk_storms.py",
    "faults/test_partition.py", "engine/cpu/eviction/test_rank_coded_eviction.py",
    "engine/gpu/test_kernel_compile.py", "system/test_workers.py", "system/test_prefix.py",
    "unit/planner/placement/test_solve.py", "system/batches/test_killed_batches.py",
    "engine/test_loop_evicted_codes.py", "engine/gpu/test_coded_attention.py", "system/test_vllm_fields.py",
    "simulation/test_failure_guarantees.py", "system/test_blocked_connections.py",
    "engine/cpu/test_tensor_parallel.py", "unit/gateway/test_preparer_pool.py", "system/test_compose.py",
    "engine/offload/test_offload_moves.py", "unit/planner/placement/test_validate.py",
    "engine/calibration/test_calibrate_command.py", "system/test_bench.py",
    "simulation/test_overdraft_storms.py", "engine/test_kv_combinations.py",
    "simulation/test_deferred_storms.py", "system/batches/test_batches_served.py", "unit/test_house_tests.py",
    "engine/cpu/test_prepared_weights.py", "system/test_simulate.py", "system/test_page.py",
    "unit/gateway/test_file_checker.py", "system/test_wheel.py", "system/test_plan.py",
    "system/test_tls_serving.py", "simulation/test_storms.py", "engine/cpu/test_attention.py",
    "system/test_attainment.py", "unit/test_house.py", "unit/benchmarks/test_kv_quality.py",
    "unit/engine/test_loop_observed.py", "engine/cpu/test_shared_prefix_attention.py",
    "system/batches/test_default_folder.py", "system/test_traces.py", "system/test_gateway.py",
    "engine/gpu/test_coded_runner.py", "system/test_overdraft.py", "unit/dashboard/test_rules.py",
    "simulation/test_broken_parts.py",
)  # fmt: skip


# Files and folders of `tests/unit`, one a line.
NOT_QUICK = TESTS / "unit" / "not_quick.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help=f"leave out what {NOT_QUICK.name} names")


@cache
def slow_paths() -> frozenset[Path]:
    """What `make quick` leaves out."""
    lines = NOT_QUICK.read_text(encoding="utf-8").splitlines()
    paths = frozenset(NOT_QUICK.parent / line for line in lines if not line.startswith("#"))
    assert not (gone := [path for path in paths if not path.exists()]), gone
    return paths


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--quick`: files and folders that take long."""
    return True if config.getoption("quick") and collection_path in slow_paths() else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: the garbage collector neither looks through it meanwhile nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order within a file stays. `make tests` has them given out in this order."""
    place = {TESTS / name: number for number, name in enumerate(LONG)}
    assert all(file.exists() for file in place)
    items.sort(key=lambda item: place.get(item.path, len(LONG)))


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory cgroup of 128 MiB; skips where none can be made."""
    try:
        group = MemoryGroup(f"diptych-test-{os.getpid()}", 128 << 20)
    except MemoryGroupError as error:
        pytest.skip(str(error))
    yield group.folder
    group.folder.rmdir()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """At the end of a run: every reason for which something was skipped, and how often."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(_reason(report) for report in skipped)
    terminalreporter.write_line(f"skipped: {len(skipped)}")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"  {count} × {reason}")


def _reason(report: pytest.TestReport) -> str:
    reason = report.longrepr
    return str(reason[2]).removeprefix("Skipped: ") if isinstance(reason, tuple) else str(reason)
