"""Streams of a device as copies need them: queues in which copies run in order, beside all other work of the device.

`CudaStream` is a thin layer over torch, so that everything above it runs in tests without a GPU, on streams that copy
as late as they may (`tests/support/late_streams.py`). Its methods raise DeviceLost if the device failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from diptych.errors import raise_if_lost


class CopyMark(Protocol):
    """A place in a stream."""

    def is_reached(self) -> bool:
        """Whether all copies before it have ended. Never waits."""

    def wait_reached(self) -> None:
        """Wait until all copies before it have ended."""


class CopyStream(Protocol):
    """Copies that run in order. Any thread may call it."""

    def follow_launched(self) -> None:
        """Copies that are added from now on begin when the device has done all that was launched before this call."""

    def add_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` to `target` in its turn; returns at once if the one that is in host memory is page-locked."""

    def set_mark(self) -> CopyMark:
        """The place behind all copies that were added so far."""


class CudaMark:
    """A recorded event of CUDA."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_reached(self) -> bool:
        """See `CopyMark.is_reached`."""
        with _device_errors():
            return bool(self._event.query())

    def wait_reached(self) -> None:
        """See `CopyMark.wait_reached`."""
        with _device_errors():
            self._event.synchronize()


class CudaStream:
    """A stream of its own on a CUDA device. Only `follow_launched` makes it wait for the default stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow_launched(self) -> None:
        """See `CopyStream.follow_launched`. All work but copies is launched on the default stream."""
        with _device_errors():
            self._stream.wait_stream(torch.cuda.default_stream(self._device))

    def add_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `CopyStream.add_copy`."""
        with _device_errors(), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def set_mark(self) -> CopyMark:
        """See `CopyStream.set_mark`."""
        with _device_errors():
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            return CudaMark(event)


@contextmanager
def _device_errors() -> Iterator[None]:
    """Raises DeviceLost instead of an error of the device."""
    try:
        yield
    except RuntimeError as error:
        raise_if_lost(error)
        raise
