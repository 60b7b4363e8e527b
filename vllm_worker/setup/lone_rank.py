"""Process groups of a rank that is alone: one for all that vLLM asks for. Imports torch, not vLLM.

vLLM makes a dozen groups. On CPUs each is gloo's and has a thread that polls a hundred times per second: together they
take 3 % of a core, for a rank that exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as distributed


def share_groups() -> None:
    """From now on `torch.distributed` gives this process, whose world is itself, the same group for the same backend.

    Such a group ends with the default one.
    """
    made: dict[tuple[tuple[int, ...], str], Any] = {}
    make_group: Any = distributed.new_group
    end_group: Any = distributed.destroy_process_group

    def new_group(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        key = tuple(ranks or ()), str(options.get("backend"))
        if key not in made:
            made[key] = make_group(ranks, *args, **options)
        return made[key]

    def destroy_process_group(group: Any = None) -> None:
        if group is None:
            made.clear()
        if not any(group is shared for shared in made.values()):
            end_group(group)

    distributed.new_group = new_group
    distributed.destroy_process_group = destroy_process_group
