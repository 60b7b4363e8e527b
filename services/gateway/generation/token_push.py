"""Writes the new text of a stream to its connection at once, without a task in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.gateway.generation.formats import MAX_WRITTEN_TOKENS, OutputFormat
from services.gateway.generation.generation import Generation
from services.gateway.http.response_writer import ResponseWriter


class TokenPush:
    """Writes the text of one choice when it comes, while the task that writes the answer waits for it.

    What may take long, or has to wait, is left to that task: log-probabilities, token ids, the end of an answer, a
    failure, and whatever comes while the client reads too slowly.
    """

    def __init__(
        self,
        generation: Generation,
        output_format: OutputFormat,
        writer: ResponseWriter,
        hold_kept: Callable[[], None],
    ) -> None:
        """`hold_kept` counts the memory of what the format keeps of the answer."""
        self._generation, self._format, self._writer = generation, output_format, writer
        self._stream, self._hold_kept = generation.streams[0], hold_kept
        # When something was last written, on the monotonic clock; and what failed, for the task to raise.
        self.written_s = 0.0
        self.error: Exception | None = None

    @staticmethod
    def fits(generation: Generation) -> bool:
        """Whether the pieces of an answer are small, and of one choice."""
        resolved = generation.resolved
        scored = resolved.logprobs is not None or resolved.prompt_logprobs is not None
        return len(generation.streams) == 1 and not (scored or resolved.return_ids or resolved.echo)

    @contextmanager
    def while_waiting(self) -> Iterator[None]:
        """Within this context new text is written when it comes.

        Raises:
            Exception: what failed meanwhile.
        """
        self._generation.push = self.write_news
        try:
            yield
        finally:
            self._generation.push = None
        if self.error is not None:
            raise self.error

    def write_news(self) -> bool:
        """Write what is new. Returns False if the task has to do it."""
        stream = self._stream
        ended = stream.answer.finish is not None or self._generation.failure is not None
        if ended or self.error is not None or not self._writer.can_write_now:
            return False
        try:
            piece = stream.answer.take_piece()
            if not piece:
                return True
            used = self._generation.usage_so_far(0)
            frames = b"".join(
                [
                    frame
                    for part in piece.split_pieces(MAX_WRITTEN_TOKENS)
                    for frame in self._format.delta_events(0, part, used)
                ]
            )
        except Exception as error:
            # It concerns this answer alone.
            self.error = error
            return False
        self._hold_kept()
        if frames:
            self._writer.write_now(frames)
            self.written_s = time.monotonic()
            stream.mark_written(self.written_s)
        return True
