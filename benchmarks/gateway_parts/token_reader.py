"""A client in a process of its own: `python -m benchmarks.gateway_parts.token_reader PORT STREAMS SECONDS`.

It opens streams, prints "open", and then the tokens that came within so many seconds.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from benchmarks.gateway_parts.scripted import BODY
from benchmarks.load.deployment import StampedStream

# Of an answer that goes on for longer than it is read, and for which all others have room too.
READ_TOKENS = 1 << 15


async def count_tokens(port: int, streams: int, seconds: float) -> int:
    """The tokens of long streams within so many seconds."""
    opened = [await StampedStream.open(port, **BODY, max_tokens=READ_TOKENS) for _ in range(streams)]
    for stream in opened:
        await stream.until(2)
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    before = sum(len(stream.stamps_s) for stream in opened)
    await asyncio.sleep(seconds)
    return sum(len(stream.stamps_s) for stream in opened) - before


if __name__ == "__main__":
    print(uvloop.run(count_tokens(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))), flush=True)
