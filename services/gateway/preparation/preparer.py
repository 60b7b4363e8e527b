"""The event loop's end of one preparer: sends a job, answers its questions about grammars, and awaits the result."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import msgspec

from services.gateway.preparation.file_job import FileJobResult
from services.gateway.preparation.fork_server import FRAME_HEAD_BYTES, frame_head, frame_size
from services.gateway.preparation.preparation_job import (
    GrammarChecked,
    GrammarFinding,
    GrammarQuery,
    PreparationResult,
)

# Seconds to wait for the fork server's report about how a preparer ended.
EXIT_REPORT_TIMEOUT_S = 5.0
MAX_FINDINGS = 1024

_reports = msgspec.msgpack.Decoder(PreparationResult | GrammarQuery | GrammarChecked)
_file_reports = msgspec.msgpack.Decoder(FileJobResult)


class PreparerDied(Exception):
    """A preparer ended during a job.

    `status` is its exit status, if known. `checking` names the grammar that it was checking, if any.
    """

    def __init__(self, status: int | None, checking: GrammarQuery | None) -> None:
        super().__init__(f"a preparer ended with status {status}")
        self.status, self.checking = status, checking


class GrammarFindings:
    """A cache of findings about grammars, by digest. The least recently used one is dropped first."""

    def __init__(self) -> None:
        self._findings: OrderedDict[bytes, GrammarFinding] = OrderedDict()

    def get_finding(self, grammar: bytes) -> GrammarFinding | None:
        """The finding about a grammar, given its digest; None if it is not in the cache."""
        if grammar in self._findings:
            self._findings.move_to_end(grammar)
        return self._findings.get(grammar)

    def store_finding(self, grammar: bytes, finding: GrammarFinding) -> None:
        """Add the finding about a grammar, given its digest."""
        self._findings[grammar] = finding
        if len(self._findings) > MAX_FINDINGS:
            self._findings.popitem(last=False)


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

    async def run_job(self, job: bytes, findings: GrammarFindings) -> PreparationResult:
        """The result of `job`, which is the bytes of a `PreparationJob`.

        Raises:
            PreparerDied: the process ended first.
        """
        checking: GrammarQuery | None = None
        try:
            await self._write_frame(job)
            while True:
                report: PreparationResult | GrammarQuery | GrammarChecked = _reports.decode(
                    await self._read_frame()
                )
                if isinstance(report, GrammarQuery):
                    checking = report
                    await self._write_frame(msgspec.msgpack.encode(findings.get_finding(report.grammar)))
                elif isinstance(report, GrammarChecked):
                    assert checking is not None
                    findings.store_finding(checking.grammar, report.finding)
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
