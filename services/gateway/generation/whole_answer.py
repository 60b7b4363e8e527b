"""Joins the body of an answer that is not streamed, for its HTTP response or for the result of a line of a batch.

A large body comes in parts, as fast as they are taken: it is never in memory beside the answers that it is made from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

from msgspec import UNSET

from services.gateway.generation.formats import OutputFormat, best_answers
from services.gateway.generation.generation import Generation
from services.gateway.openai.schemas.response_schema import DetailsField

# A body with more bytes is written in parts of about this size.
MAX_PART_BYTES = 256 << 10
# Other tasks may run after a piece with this many bytes.
PAUSE_BYTES = 1024


async def complete_answer(generation: Generation, output_format: OutputFormat) -> None:
    """Wait until all answers are complete, and name the KV class, which is known then.

    Raises:
        RequestError: one of them failed.
    """
    await generation.wait_until_complete()
    for stream in generation.streams:
        stream.mark_written(stream.record.first_token_s or time.monotonic())
    output_format.head.name_kv_class(generation.kv)


async def write_parts(
    generation: Generation,
    output_format: OutputFormat,
    write_part: Callable[[bytes, bool], Awaitable[None]],
    details: DetailsField = UNSET,
) -> None:
    """Write the body of a complete answer with `write_part`, which is told whether a part is the last one.

    Raises:
        ClientStalled: the answer was dropped, since its memory was needed for those of others.
    """
    texts, is_last = best_answers(generation.resolved, generation.answers), False
    pieces = output_format.full_body_parts(texts, generation.usage, details)
    with generation.wait_for_reader():
        while not is_last:
            part, is_last = await gather_pieces(pieces, MAX_PART_BYTES)
            await write_part(part, is_last)
    generation.mark_completed()


async def gather_pieces(pieces: Iterator[bytes], num_bytes: int) -> tuple[bytes, bool]:
    """Join pieces until they have `num_bytes`, with pauses for other tasks. The flag says whether none is left."""
    gathered = bytearray()
    for piece in pieces:
        gathered += piece
        if len(gathered) >= num_bytes:
            return bytes(gathered), False
        if len(piece) >= PAUSE_BYTES:
            await asyncio.sleep(0)
    return bytes(gathered), True
