"""Flips bits in the transfer buffer of a running worker, where KV that it offers lies."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import msgspec

from kvtransfer.shared_memory import PAGE_BYTES
from kvtransfer.ticket import MAC_BYTES, Ticket


def flip_offered(pid: int, raw_ticket: bytes, num_slabs: int, rng: random.Random) -> None:
    """Flip a bit of a chunk that the ticket offers, in the buffer of `num_slabs` slabs of process `pid`.

    Raises:
        OSError: the process has no such buffer, or has ended.
    """
    ticket = msgspec.msgpack.decode(raw_ticket[:-MAC_BYTES], type=Ticket)
    chunk_bytes, chunk = ticket.context.chunk_bytes, rng.choice(ticket.chunks)
    at = PAGE_BYTES + chunk.slab * chunk_bytes + rng.randrange(chunk_bytes)
    flip_bit(find_memory(pid, num_slabs * chunk_bytes), at, rng.randrange(8))


def find_memory(pid: int, num_bytes: int) -> Path:
    """The anonymous file of the `SharedMemory` of this size. Raises OSError if the process has none."""
    for file in Path(f"/proc/{pid}/fd").iterdir():
        # The process may close a file meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(file).startswith("/memfd:") and file.stat().st_size == PAGE_BYTES + num_bytes:
                return file
    raise OSError(f"process {pid} shares no memory of {num_bytes} bytes")


def flip_bit(file: Path, at: int, bit: int) -> None:
    """Flip bit `bit` of byte `at` of a file."""
    with file.open("r+b", buffering=0) as memory:
        (before,) = os.pread(memory.fileno(), 1, at)
        os.pwrite(memory.fileno(), bytes([before ^ 1 << bit]), at)
