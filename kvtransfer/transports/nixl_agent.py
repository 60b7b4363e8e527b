"""A NIXL agent, made with the low-level binding of NIXL's Python API (`kvtransfer.transports.nixl` says why)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from diptych.errors import TransferError

# Longest sleep of a source's progress thread in microseconds; events wake it earlier.
MAX_IDLE_US = 100_000

# (source address, own address, number of bytes).
ReadSegment = tuple[int, int, int]


class NixlAgent:
    """One NIXL agent with the UCX backend, and the host memory registered with it. `close` ends all its transfers.

    Raises TransferError if NIXL is not installed or the agent does not start.
    """

    def __init__(self, name: str, regions: Sequence[memoryview], *, serve: bool) -> None:
        try:
            self.api: Any = importlib.import_module("nixl._bindings")
        except ImportError as error:
            # NIXL is an optional dependency, and only this file needs it.
            raise TransferError("NIXL is not usable here", str(error), "pip install nixl") from error
        config = self.api.nixlAgentConfig()
        config.useProgThread, config.pthrDelay, config.useListenThread = serve, MAX_IDLE_US, False
        config.syncMode = self.api.NIXL_THREAD_SYNC_STRICT
        try:
            self.agent: Any = self.api.nixlAgent(name, config)
            backend = self.agent.createBackend("UCX", {"ucx_error_handling_mode": "none"})
            held = [(address_of(region), region.nbytes, 0, "") for region in regions]
            self.agent.registerMem(self.api.nixlRegDList(self.api.DRAM_SEG, held), [backend])
        except Exception as error:
            # NIXL's exceptions have no common base class.
            fix = "check UCX_TLS and UCX_NET_DEVICES"
            raise TransferError("the NIXL agent did not start", repr(error), fix) from error
        # Kept, since registered memory must outlive the agent.
        self._regions = regions

    def add_peer(self, metadata: bytes) -> Any:
        """Introduce another agent by its metadata; returns the peer for `post_read`."""
        return self.agent.loadRemoteMD(metadata)

    def post_read(self, peer: Any, segments: Sequence[ReadSegment]) -> int:
        """Start to read `segments` from `peer`; returns the handle of the transfer."""
        api = self.api
        here = api.nixlXferDList(api.DRAM_SEG, [(own, size, 0) for _, own, size in segments])
        there = api.nixlXferDList(api.DRAM_SEG, [(far, size, 0) for far, _, size in segments])
        handle: int = self.agent.createXferReq(api.NIXL_READ, here, there, peer, b"", [])
        self.agent.postXferReq(handle, b"")
        return handle

    def is_done(self, handle: int) -> bool:
        """Whether the read is complete; if so, its handle is released. Polling also drives all reads of this agent.

        Raises:
            TransferError: the read failed, or the agent was closed.
        """
        if self.agent is None:
            raise TransferError("a NIXL read failed", "its connection was ended")
        state = self.agent.getXferStatus(handle)
        if state == self.api.NIXL_IN_PROG:
            return False
        if state != self.api.NIXL_SUCCESS:
            raise TransferError("a NIXL read failed", str(state))
        self.agent.releaseXferReq(handle)
        return True

    def close(self) -> None:
        """End the agent, and with it every transfer in flight."""
        self.agent = None


def address_of(memory: memoryview) -> int:
    """The address at which `memory` begins in this process."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
