"""Memory that other processes of the same host can map: the prefill worker's KV pool is allocated in it.

The memory is an anonymous file (memfd), so no file is left behind when the process dies. It is sealed against resizing:
a reader that has mapped it can never fault on a page that was removed.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

import msgspec

PAGE_BYTES = mmap.PAGESIZE
POOL_MAGIC = b"diptych-kv-pool\1"
NONCE_BYTES = 16
# From <linux/mman.h>; Python's mmap module does not define it.
_MADV_POPULATE_WRITE = 23
REQUIRED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemoryAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a process of the same user on the same host finds a `SharedMemory`."""

    host: str
    pid: int
    fd: int
    num_bytes: int
    nonce: bytes


class SharedMemory:
    """`num_bytes` of zeroed, page-aligned memory at `view`. The file's first page only identifies it."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes <= 0:
            raise ValueError("a pool needs at least one byte")
        self.num_bytes, self.nonce = num_bytes, os.urandom(NONCE_BYTES)
        self.fd = os.memfd_create("diptych-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, PAGE_BYTES + num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
        self._map = mmap.mmap(self.fd, PAGE_BYTES + num_bytes)
        self._map[: len(POOL_MAGIC) + NONCE_BYTES] = POOL_MAGIC + self.nonce
        self.view = memoryview(self._map)[PAGE_BYTES:]
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def populate_pages(self, start: int, num_bytes: int) -> None:
        """Allocate the pages of `view[start : start + num_bytes]` at once, instead of at the first write to each page.

        Their content stays. `start` is a multiple of a page. The call releases the GIL.

        Raises:
            OSError: the kernel cannot do it (Linux before 5.14), or there is no memory.
        """
        if self._libc.madvise(self._base + PAGE_BYTES + start, num_bytes, _MADV_POPULATE_WRITE) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def address(self) -> SharedMemoryAddress:
        """The address with which another process of this host can map this memory (`attach_memory`)."""
        return SharedMemoryAddress(host_id(), os.getpid(), self.fd, self.num_bytes, self.nonce)

    def close(self) -> None:
        """No other process can open the memory any more; it is freed with its last mapping. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def attach_memory(address: SharedMemoryAddress, writable: bool = False) -> memoryview:
    """Map another process's `SharedMemory`, read-only unless `writable`; it stays mapped as long as the view lives.

    Raises:
        OSError: another host, no such process, no permission, or not the memory that `address` describes.
    """
    if address.host != host_id():
        raise OSError(f"the pool is on host {address.host}, this is {host_id()}")
    mode, prot = (os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE) if writable else (os.O_RDONLY, mmap.PROT_READ)
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", mode | os.O_CLOEXEC)
    try:
        size = PAGE_BYTES + address.num_bytes
        if os.fstat(fd).st_size != size:
            raise OSError(f"the pool has {os.fstat(fd).st_size} bytes, {size} were announced")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & REQUIRED_SEALS != REQUIRED_SEALS:
            raise OSError("the pool's memory is not sealed against resizing")
        mapped = memoryview(mmap.mmap(fd, size, prot=prot))
    finally:
        os.close(fd)
    # The process id or descriptor may belong to another, later process by now.
    if mapped[: len(POOL_MAGIC) + NONCE_BYTES] != POOL_MAGIC + address.nonce:
        raise OSError("the process at that number is not the one that announced the pool")
    return mapped[PAGE_BYTES:]


def host_id() -> str:
    """A name of the host that is equal for two processes exactly if one can open the other's descriptors in /proc.

    It joins the boot id (same kernel) and the pid name space (same process numbers). The host's name is left out:
    containers have names of their own, and may share a pid name space.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
