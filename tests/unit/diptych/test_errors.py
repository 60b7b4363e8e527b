"""Which errors mean that a device failed, and which do not."""

from __future__ import annotations

import pytest

from diptych.errors import DeviceLost, GrammarError, find_device_loss, raise_if_lost


class AcceleratorError(RuntimeError):
    """As torch's."""


class OutOfMemoryError(RuntimeError):
    """As torch's."""


@pytest.mark.parametrize(
    "error",
    [
        AcceleratorError("an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("CUDA driver error: unspecified launch failure"),
        RuntimeError("Triton Error [CUDA]: misaligned address"),
        DeviceLost("it was known before"),
    ],
)
def test_a_failed_device_is_known_by_its_error(error: BaseException) -> None:
    with pytest.raises(DeviceLost) as caught:
        try:
            raise_if_lost(error)
        except Exception:
            pytest.fail("code that fails single requests catches it")
    assert caught.value.error.what == "the device failed" and len(caught.value.error.lines()) <= 6


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("CUDA error: out of memory"),
        RuntimeError("keys and values must be finite"),
        # Texts of requests: nobody may end a worker with words.
        GrammarError("CUDA error: no such rule"),
        ValueError("CUDA error: of a client"),
        RuntimeError("the pattern 'CUDA error: x' does not compile"),
    ],
)
def test_no_other_error_is_a_failed_device(error: Exception) -> None:
    assert find_device_loss(error) is None
    raise_if_lost(error)
