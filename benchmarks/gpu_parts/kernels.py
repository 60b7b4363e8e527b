"""The environment of a check, and one test of each kind of kernel."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import pytest
import torch

from benchmarks.gpu_parts.check_part import PartContext

PACKAGES = ("torch", "triton", "numpy", "safetensors", "nixl")
# One of each kind, in each type once.
KERNEL_TESTS = (
    "tests/gpu/test_kernels.py::test_decode[0-4-128-bfloat16]",
    "tests/gpu/test_kernels.py::test_decode[100-3-80-float16]",
    "tests/gpu/test_kernels.py::test_decode[0-8-64-float32]",
    "tests/gpu/test_kernels.py::test_prefill[0-3000-1000-128-bfloat16]",
    "tests/gpu/test_kernels.py::test_prefill[100-63-2-80-float16]",
    "tests/gpu/test_kernels.py::test_the_whole_decoder_equals_that_of_the_cpu",
    "tests/gpu/test_coded_kernels.py::test_bytes_and_attention_are_those_of_the_codec[nuq4-1%]",
    "tests/gpu/test_coded_kernels.py::test_bytes_and_attention_are_those_of_the_codec[int8]",
    "tests/gpu/test_coded_kernels.py::test_bytes_and_attention_are_those_of_the_codec[tq4]",
)


def record_environment(context: PartContext) -> None:
    """Device, driver and versions. Raises RuntimeError if torch sees no device."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    context.record({"versions": versions, "cuda": torch.version.cuda or "none"})
    if context.is_toy:
        context.record({"gpu": context.device})
        return
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    properties = torch.cuda.get_device_properties(0)
    context.record(
        {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "gpus": torch.cuda.device_count(),
        }
    )


class OutcomeCounter:
    """A plugin of pytest that records after each test how many have passed and failed so far."""

    def __init__(self, context: PartContext) -> None:
        self._context = context
        self.passed, self.failed = 0, [""][:0]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test that has run; one that is skipped has not shown anything."""
        if report.when == "call" and report.passed:
            self.passed += 1
        elif report.failed or report.skipped:
            self.failed.append(report.nodeid.rsplit("::", 1)[-1])
        self.record()

    def record(self) -> None:
        """Write down the counts; tests that have not run yet count as failed."""
        missing = len(KERNEL_TESTS) - self.passed - len(self.failed)
        self._context.record(
            {
                "kernels_passed": self.passed,
                "kernels_failed": len(self.failed) + max(0, missing),
                "kernels_failing": self.failed,
            }
        )


def run_kernel_tests(context: PartContext) -> None:
    """Run `KERNEL_TESTS` in this process. Raises RuntimeError if one of them fails."""
    counter = OutcomeCounter(context)
    counter.record()
    options = ["-m", "gpu", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    pytest.main([*options, *KERNEL_TESTS], plugins=[counter])
    if counter.failed or not counter.passed:
        raise RuntimeError(f"{len(counter.failed)} kernel tests failed: {', '.join(counter.failed)}")
