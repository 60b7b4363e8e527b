"""Counts the memory that tensors take while code runs: what there is, and its peak, by the kind of device."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedMemory(TorchDispatchMode):
    """Within it, every storage that an operation of torch makes is counted until it is freed.

    A device of the kind "meta" has shapes but no memory, so it takes the place of a device of any size.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Bytes by kind of device: now, and the most at a time.
        self.held, self.peak = Counter[str](), Counter[str]()
        self._known = set[int]()

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # What was made before is not counted.
        before = {one.untyped_storage()._cdata for one in _list_tensors((args, kwargs))}
        found = function(*args, **(kwargs or {}))
        for one in _list_tensors(found):
            storage = one.untyped_storage()
            if storage._cdata not in before and storage._cdata not in self._known:
                self._count(storage)
        return found

    def restart_peak(self) -> None:
        """The peak is what is held now."""
        self.peak = Counter(self.held)

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage, until it is freed."""
        kind, size, number = storage.device.type, storage.nbytes(), storage._cdata

        def forget() -> None:
            self._known.discard(number)
            self.held[kind] -= size

        self._known.add(number)
        self.held[kind] += size
        self.peak[kind] = max(self.peak[kind], self.held[kind])
        weakref.finalize(storage, forget)


def _list_tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]
