"""Reads the gateway's specification in a separate process, so that preparers never hold API keys.

    standard input ─▶ spec reader ── GatewaySpec without keys ─▶ gateway ─▶ tokenizer ─▶ fork server
                           └──────── with keys, once that is done ─▶ gateway

Preparers work on clients' data. They are forked from the gateway, and a fork copies all memory of its parent. Another
process therefore reads the specification from standard input, and gives the gateway the keys only after the fork.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import BinaryIO

import msgspec

from diptych.errors import ConfigError
from diptych.specs import GatewaySpec
from services.gateway.preparation.fork_server import (
    FrameSocket,
    keep_only_connection,
    run_forked,
)


class _UnreadableSpec(msgspec.Struct, frozen=True):
    """Sent in place of a specification: the reason why the line is none."""

    why: str


class SpecReader:
    """Forks a process that reads the specification and hands it out in two steps."""

    def __init__(self, source: BinaryIO) -> None:
        """Must be called while the process has one thread, and before anything is read from `source`."""
        self._connection, theirs = socket.socketpair()
        self._frames = FrameSocket(self._connection)
        sys.stdout.flush()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            run_forked(lambda: _send_specs(source.readline(), keep_only_connection(theirs, parent)))
        theirs.close()

    def read_without_keys(self) -> GatewaySpec:
        """The specification without any keys; only the number of API keys is right.

        Raises:
            ConfigError: the line is not a specification.
        """
        return self._read_spec()

    def read_with_keys(self) -> GatewaySpec:
        """The complete specification. `read_without_keys` must be called first. Ends the reader process.

        Raises:
            ConfigError: the reader process has died.
        """
        with contextlib.suppress(OSError):
            self._frames.write_frame(b"")
        try:
            return self._read_spec()
        finally:
            self.close()

    def close(self) -> None:
        """End the reader process. Idempotent."""
        if self._connection.fileno() >= 0:
            self._connection.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)

    def _read_spec(self) -> GatewaySpec:
        """The next specification from the reader process. Raises ConfigError if there is none."""
        frame = None
        with contextlib.suppress(OSError):
            frame = self._frames.read_frame()
        try:
            return msgspec.json.decode(frame or b"", type=GatewaySpec)
        except msgspec.MsgspecError:
            why = "the process that reads it has died"
            with contextlib.suppress(msgspec.MsgspecError):
                why = msgspec.json.decode(frame or b"", type=_UnreadableSpec).why
        raise ConfigError("the gateway's specification cannot be read", why, "start it with `diptych serve`")


def _send_specs(line: bytes, connection: socket.socket) -> None:
    """The reader process: send the specification without keys and, when asked, with keys."""
    frames = FrameSocket(connection)
    try:
        spec = msgspec.json.decode(line, type=GatewaySpec)
    except msgspec.MsgspecError as error:
        return frames.write_frame(msgspec.json.encode(_UnreadableSpec(str(error))))
    hidden = msgspec.structs.replace(
        spec,
        api_keys=("",) * len(spec.api_keys),
        priority_keys=(),
        admin_key=None,
        metrics_keys=(),
        status_keys=(),
    )
    frames.write_frame(msgspec.json.encode(hidden))
    if frames.read_frame() is not None:
        frames.write_frame(msgspec.json.encode(spec))
