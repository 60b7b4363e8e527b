"""A stream tells its end, also when the end comes while other streams are written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

from services.gateway.generation.formats import OutputFormat, ResponseHead
from services.gateway.generation.generation import Generation
from services.gateway.generation.output_text import OutputPiece
from services.gateway.generation.scored_tokens import ScoredTokens
from services.gateway.generation.streaming import GenerationResponse
from services.gateway.generation.whole_answer import MAX_PART_BYTES
from services.gateway.http.response_writer import ResponseWriter


class FakeSequenceStream:
    """Has one piece to tell; the rest and the end come while that is being written."""

    def __init__(self) -> None:
        self.answer = SimpleNamespace(finish=None, stop_reason=None)
        self.pieces = ["first"]

    async def pack_logprobs(self) -> None: ...

    def take_piece(self) -> Any:
        text, self.pieces = "".join(self.pieces), []
        asyncio.get_running_loop().call_soon(self.end)
        return (
            SimpleNamespace(text=text, split_pieces=lambda _: [SimpleNamespace(start=1, text=text)])
            if text
            else OutputPiece("", ScoredTokens(0))
        )

    def end(self) -> None:
        if self.answer.finish is None:
            self.pieces.append("rest")
            self.answer.finish = "length"

    def mark_written(self, now_s: float) -> None: ...


async def written_text() -> str:
    written = bytearray()

    async def start_response(status: int, headers: object) -> None: ...

    async def write_body(data: bytes) -> None:
        written.extend(data)

    async def end_response() -> None: ...

    async def wait_for_news(timeout_s: float | None) -> bool:
        await asyncio.sleep(0)
        return True

    generation = SimpleNamespace(
        streams=[FakeSequenceStream()],
        resolved=SimpleNamespace(include_usage=False, logprobs=0),
        failure=None,
        flooded=False,
        usage_so_far=lambda choice: None,
        wait_for_news=wait_for_news,
        mark_completed=lambda: None,
        wait_for_reader=nullcontext,
        kv=None,
        cached_tokens=0,
    )
    view = SimpleNamespace(
        head=ResponseHead("", 0, "", None),
        ping=b"",
        kept_bytes=0,
        begin_events=lambda choice, usage: [],
        delta_events=lambda choice, part, usage: [part.text.encode()],
        end_events=lambda choice, text, usage: [text.finish.encode()],
        closing_events=lambda usage, details: [b"[DONE]"],
    )
    respond = GenerationResponse(
        cast(Generation, generation),
        cast(OutputFormat, view),
        set(),
        stall_s=30.0,
    )
    await respond._write_stream(
        cast(
            ResponseWriter,
            SimpleNamespace(start_response=start_response, write_body=write_body, end_response=end_response),
        )
    )
    return written.decode()


def test_an_end_that_comes_while_other_tasks_run_is_written() -> None:
    text = asyncio.run(written_text())
    assert text.index("first") < text.index("rest") < text.index("length") < text.index("[DONE]")


def test_a_large_end_is_written_in_parts_between_which_other_tasks_run() -> None:
    parts, seen = [b"x" * 1000] * 1000, list[int]()

    async def main() -> None:
        written = list[int]()

        async def write_body(data: bytes) -> None:
            written.append(len(data))

        async def run_beside() -> None:
            while True:
                seen.append(sum(written))
                await asyncio.sleep(0)

        def slow_parts() -> Iterator[bytes]:
            for part in parts:
                respond._paused_s = 0.0
                yield part

        respond = GenerationResponse(
            cast(Generation, SimpleNamespace(wait_for_reader=nullcontext)),
            cast(OutputFormat, SimpleNamespace()),
            set(),
            stall_s=30.0,
        )
        writer = cast(ResponseWriter, SimpleNamespace(write_body=write_body))
        others = asyncio.create_task(run_beside())
        assert await respond._add_frames(writer, slow_parts())
        await respond._write_frames(writer)
        others.cancel()
        assert sum(written) == 1_000_000 and max(written) < 2 * MAX_PART_BYTES

    asyncio.run(main())
    # Whatever has taken `PAUSE_S` lets them run, also while the parts are written.
    assert len(seen) >= len(parts) and len(set(seen)) > 3
