"""The event loop's end of one preparer: sends a job, answers its questions about grammars, and awaits the result."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import msgspec

from services.gateway.preparation.file_job import FileJobResult
from services.gateway.preparation.fork_server import FRAME_HEAD_BYTES, frame_head, frame_size
from services.gateway.preparation.preparation_job import (
    GrammarChecked,
    GrammarQuery,
    GrammarVerdict,
    PreparationResult,
)

# Seconds to wait for the fork server's report about how a preparer ended.
EXIT_REPORT_TIMEOUT_S = 5.0
MAX_VERDICTS = 1024

_reports = msgspec.msgpack.Decoder(PreparationResult | GrammarQuery | GrammarChecked)
_file_reports = msgspec.msgpack.Decoder(FileJobResult)


class PreparerDied(Exception):
    """A preparer ended during a job.

    `status` is its exit status, if known. `checking` is the digest of the grammar that it was checking, if any.
    """

    def __init__(self, status: int | None, checking: bytes | None) -> None:
        super().__init__(f"a preparer ended with status {status}")
        self.status, self.checking = status, checking


class GrammarVerdicts:
    """A cache of verdicts about grammars, by digest. The least recently used one is dropped first."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()

    def find_verdict(self, grammar: bytes) -> GrammarVerdict | None:
        """The verdict about a grammar, given its digest; None if it is not in the cache."""
        if grammar in self._verdicts:
            self._verdicts.move_to_end(grammar)
        return self._verdicts.get(grammar)

    def store_verdict(self, grammar: bytes, verdict: GrammarVerdict) -> None:
        """Add the verdict about a grammar, given its digest."""
        self._verdicts[grammar] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)


class Preparer:
    """A process that does one job at a time. A `retired` one gets no more jobs."""

    def __init__(
        self,
        name: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ended: asyncio.Future[int | None],
    ) -> None:
        self.name, self.retired = name, False
        self._reader, self._writer, self._ended = reader, writer, ended

    async def run_job(self, job: bytes, verdicts: GrammarVerdicts) -> PreparationResult:
        """The result of `job`, which is the bytes of a `PreparationJob`.

        Raises:
            PreparerDied: the process ended first.
        """
        checking: bytes | None = None
        try:
            await self._write_frame(job)
            while True:
                report: PreparationResult | GrammarQuery | GrammarChecked = _reports.decode(
                    await self._read_frame()
                )
                if isinstance(report, GrammarQuery):
                    checking = report.grammar
                    await self._write_frame(msgspec.msgpack.encode(verdicts.find_verdict(checking)))
                elif isinstance(report, GrammarChecked):
                    assert checking is not None
                    verdicts.store_verdict(checking, report.verdict)
                    checking = None
                else:
                    return report
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise PreparerDied(await self._exit_status(), checking) from error

    async def run_file_job(self, job: bytes) -> FileJobResult:
        """The result of `job`, which is the bytes of a `FileJob`.

        Raises:
            PreparerDied: the process ended first.
        """
        try:
            await self._write_frame(job)
            result: FileJobResult = _file_reports.decode(await self._read_frame())
            return result
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise PreparerDied(await self._exit_status(), None) from error

    def close(self) -> None:
        """Close the connection, which ends the process."""
        self._writer.transport.abort()

    async def _write_frame(self, frame: bytes) -> None:
        self._writer.write(frame_head(frame))
        self._writer.write(frame)
        await self._writer.drain()

    async def _read_frame(self) -> bytes:
        return await self._reader.readexactly(frame_size(await self._reader.readexactly(FRAME_HEAD_BYTES)))

    async def _exit_status(self) -> int | None:
        try:
            async with asyncio.timeout(EXIT_REPORT_TIMEOUT_S):
                return await asyncio.shield(self._ended)
        except TimeoutError:
            return None
