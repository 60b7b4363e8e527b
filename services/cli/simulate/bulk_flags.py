"""Which placements and flags of `diptych simulate` mean workers for bulk work alone."""

from __future__ import annotations

import re

from diptych.errors import ConfigError

# The flags that such workers have.
FLAGS = {"model", "placement", "profile", "bulk", "bulk_memory", "bulk_disk", "as_json"}


def count_bulk_workers(placement: str | None) -> int | None:
    """The number of bulk workers in a placement such as "2B"; None if it has none.

    Raises:
        ConfigError: there are others beside them, which `diptych serve` refuses too.
    """
    parts = [] if placement is None else [part.strip() for part in placement.split("+")]
    found = [re.fullmatch(r"(\d+)\s*B", part, re.IGNORECASE) for part in parts]
    if not any(found):
        return None
    if len(found) > 1 or found[0] is None or not int(found[0][1]):
        why = "bulk workers serve batches alone"
        raise ConfigError(f"the placement {placement!r} cannot be simulated", why, "use --placement 2B")
    return int(found[0][1])
