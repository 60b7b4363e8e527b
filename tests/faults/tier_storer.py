"""A process that stores and reads chunks of a store until it is killed: `python -m tests.faults.tier_storer FOLDER N`.

It prints one line per batch: how many reads gave a chunk, and how many of these were wrong.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from diptych.errors import CorruptChunk
from tests.unit.kvcache.tiers.stored_chunks import content_of, new_chunk, open_store, read_number


def main(folder: str, room: int, seed: int) -> None:
    """Store and read until killed."""
    store, rng = open_store(Path(folder), room), random.Random(seed)
    print("open", flush=True)
    while True:
        store.store([new_chunk(rng.randrange(2 * room)) for _ in range(4)])
        right = wrong = 0
        for number in rng.sample(range(2 * room), 8):
            try:
                found = read_number(store, number)
            except (KeyError, CorruptChunk):
                continue
            right, wrong = right + (found == content_of(number)), wrong + (found != content_of(number))
        print(right, wrong, store.num_corrupt, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
