"""Streams on CPU tensors that copy as late as they may, into poisoned targets (`kvcache.device.streams.CopyStream`).

A copy is made when somebody waits for a mark behind it, or has asked often enough whether that is reached. What is
launched on the device is kept as well, until a stream that follows it is about to copy, or `DeviceQueue.finish`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from kvcache.device.streams import CopyMark

POISON = 0xFF


class DeviceQueue:
    """The default stream of a device that has not done yet what was launched."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._launched: deque[Callable[[], object]] = deque()
        self._done = 0

    @property
    def end(self) -> int:
        """Number of all works that were launched."""
        with self.lock:
            return self._done + len(self._launched)

    def launch(self, work: Callable[[], object]) -> None:
        """Let the device do `work` at some time."""
        with self.lock:
            self._launched.append(work)

    def finish(self, end: int | None = None) -> None:
        """Do the first `end` works that were ever launched; None: all."""
        with self.lock:
            while self._launched and (end is None or self._done < end):
                self._launched.popleft()()
                self._done += 1


class LateStream:
    """One stream. `polls` is how often a mark says that it is not reached, None: until somebody waits for it.

    With `eager` it copies as early as possible instead. `error` is raised by marks from then on when it is set.
    """

    def __init__(self, device: DeviceQueue, polls: int | None = 3, eager: bool = False) -> None:
        self.polls, self.eager, self.error = polls, eager, None
        self._device, self._follows = device, 0
        # (copy, what the stream follows), in order; and how many were made.
        self._waiting: deque[tuple[Callable[[], object], int]] = deque()
        self.added = self.made = 0

    error: BaseException | None

    def follow_launched(self) -> None:
        """See `CopyStream.follow_launched`."""
        self._follows = self._device.end

    def add_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `CopyStream.add_copy`."""
        assert target.shape == source.shape and target.is_contiguous() and source.is_contiguous()
        with self._device.lock:
            target.fill_(POISON)
            self._waiting.append((lambda: target.copy_(source), self._follows))
            self.added += 1
            if self.eager:
                self.make_copies(self.added)

    def set_mark(self) -> CopyMark:
        """See `CopyStream.set_mark`."""
        return LateMark(self, self.added)

    def make_copies(self, end: int) -> None:
        """Make the first `end` copies that were ever added, after what they follow."""
        with self._device.lock:
            while self.made < end:
                copy, follows = self._waiting.popleft()
                self._device.finish(follows)
                copy()
                self.made += 1


class LateMark:
    """A place behind the first `end` copies of a stream."""

    def __init__(self, stream: LateStream, end: int) -> None:
        self._stream, self._end, self._asked = stream, end, 0

    def is_reached(self) -> bool:
        """See `CopyMark.is_reached`."""
        if self._stream.error is not None:
            raise self._stream.error
        self._asked += 1
        if self._stream.polls is not None and self._asked > self._stream.polls:
            self._stream.make_copies(self._end)
        return self._stream.made >= self._end

    def wait_reached(self) -> None:
        """See `CopyMark.wait_reached`."""
        if self._stream.error is not None:
            raise self._stream.error
        self._stream.make_copies(self._end)
