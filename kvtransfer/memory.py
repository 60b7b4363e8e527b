"""Memory that another process of the same host may read: the prefill worker's KV pool lies in it from the start.

An anonymous file (memfd), so nothing is left behind in any file system when the process dies. It is sealed against
resizing: a reader that has mapped it can never fault on a page that went away.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket

import msgspec

PAGE = mmap.PAGESIZE
MAGIC = b"diptych-kv-pool\1"
NONCE_BYTES = 16
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a `SharedMemory` is found by a process of the same user on the same host."""

    host: str
    pid: int
    fd: int
    num_bytes: int
    nonce: bytes


class SharedMemory:
    """`num_bytes` of zeroed memory, page-aligned, at `view`; the file's first page only says whose it is."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes <= 0:
            raise ValueError("a pool needs at least one byte")
        self.num_bytes, self.nonce = num_bytes, os.urandom(NONCE_BYTES)
        self.fd = os.memfd_create("diptych-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, PAGE + num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self._map = mmap.mmap(self.fd, PAGE + num_bytes)
        self._map[: len(MAGIC) + NONCE_BYTES] = MAGIC + self.nonce
        self.view = memoryview(self._map)[PAGE:]

    def address(self) -> Address:
        return Address(host_id(), os.getpid(), self.fd, self.num_bytes, self.nonce)

    def close(self) -> None:
        """No process can open it any more; the pages go when the last mapping does. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def attach(address: Address) -> memoryview:
    """Map another process's `SharedMemory` read-only; the mapping lives as long as the returned view.

    Raises:
        OSError: another host, no such process, no permission, or not the memory that `address` speaks of.
    """
    if address.host != host_id():
        raise OSError(f"the pool is on host {address.host}, this is {host_id()}")
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = PAGE + address.num_bytes
        if os.fstat(fd).st_size != size:
            raise OSError(f"the pool has {os.fstat(fd).st_size} bytes, {size} were announced")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise OSError("the pool could be resized under us")
        mapped = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
    if mapped[: len(MAGIC) + NONCE_BYTES] != MAGIC + address.nonce:  # a number of another, later process
        raise OSError("the process at that number is not the one that announced the pool")
    return mapped[PAGE:]


def host_id() -> str:
    """The same for two processes exactly when one can find the other's descriptors under /proc.

    Boot id (one kernel), pid name space (the numbers mean the same), and the host's name for people.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
