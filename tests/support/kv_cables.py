"""The way of KV between two houses: a cable of its own for each pair, while the control channel goes over the bridge.

    cable = Cable(prefill_house, decode_house, 0)
    choke = Choke(cable, "stop"); ...; choke.heal(); choke.verify()

Kinds: "stop" holds every packet, "partition" drops every packet, "slow" lets 64 kbit/s pass. Nobody is informed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from tests.support.network_namespaces import NamespaceHost, run_command

SLOW_BITS = 64_000
STOPPED_BITS, HELD_BURST = 64, 1600  # of a cable that stands still: one packet, then 8 bytes a second
SHAPES = {
    "stop": f"rate {STOPPED_BITS}bit burst {HELD_BURST} limit 4000000",
    "partition": f"rate {STOPPED_BITS}bit burst {HELD_BURST} limit 1",
    "slow": f"rate {SLOW_BITS}bit burst 4096 limit 4000000",
}
OPEN_SHAPE = "rate 10gbit burst 1000000 limit 8000000"
DRAIN_S = 10.0  # most seconds until a healed cable has passed on what it held
PIDFD_GETFD = 438  # the system call has no name in Python


class KvCable:
    """A pair of interfaces with a subnet of their own; UCX may use these and no others."""

    def __init__(self, one: NamespaceHost, other: NamespaceHost, number: int) -> None:
        self.ends, self.device = (one, other), f"kv{number}"
        self.addresses = f"10.253.{number}.1", f"10.253.{number}.2"  # never seen outside of the two houses
        run_command(
            "ip", "link", "add", self.device, "netns", one.name, "type", "veth",
            "peer", "name", self.device, "netns", other.name,
        )  # fmt: skip
        macs = []
        for house, address in zip(self.ends, self.addresses, strict=True):
            run_command(*house.command(["sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"]))
            run_command("ip", "-n", house.name, "addr", "add", f"{address}/30", "dev", self.device)
            run_command("ip", "-n", house.name, "link", "set", self.device, "up")
            macs.append(run_command(*house.command(["cat", f"/sys/class/net/{self.device}/address"])).strip())
        for house, address, mac in zip(self.ends, self.addresses[::-1], macs[::-1], strict=True):
            known = ["lladdr", mac, "dev", self.device, "nud", "permanent"]
            run_command("ip", "-n", house.name, "neigh", "replace", address, *known)

    def shape_traffic(self, do: str, shape: str = "") -> None:
        """Add, change or delete what stands before both ends."""
        words = ["tbf", *shape.split()] if shape else []
        for house in self.ends:
            run_command(*house.command(["tc", "qdisc", do, "dev", self.device, "root", *words]))

    def wake_queues(self) -> None:
        """Send a small packet from both ends: a queue that waits for a time by its old rate looks again."""
        for house, there in zip(self.ends, self.addresses[::-1], strict=True):
            run_command(*house.command(["bash", "-c", f"echo > /dev/udp/{there}/9"]))

    def tc_statistics(self) -> list[dict[str, int]]:
        """What tc has counted at both ends."""
        show = ["tc", "-s", "-j", "qdisc", "show", "dev", self.device]
        return [json.loads(run_command(*house.command(show)))[0] for house in self.ends]


class CableFault:
    """From now on packets of a cable are held, dropped or few, both ways."""

    def __init__(self, cable: KvCable, kind: str) -> None:
        self.cable, self.kind, self._began_s = cable, kind, time.monotonic()
        self._seen: list[dict[str, int]] = []
        self._lasted_s = 0.0
        cable.shape_traffic("add", SHAPES[kind])

    def heal(self) -> None:
        """What was held goes on, all of it: what is lost with the queue, TCP sends again many seconds later."""
        self._seen, self._lasted_s = self.cable.tc_statistics(), time.monotonic() - self._began_s
        self.cable.shape_traffic("change", OPEN_SHAPE)
        ends_s = time.monotonic() + DRAIN_S
        while True:
            self.cable.wake_queues()
            if not any(end["backlog"] for end in self.cable.tc_statistics()):
                break
            assert time.monotonic() < ends_s, f"the cable does not drain: {self.cable.tc_statistics()}"
        self.cable.shape_traffic("del")

    def verify(self) -> str:
        """What passed. Raises AssertionError if it was not what should, or if there was nothing to be kept back."""
        seen = self._seen
        passed = [end["bytes"] for end in seen]
        text = f"{passed} bytes passed in {self._lasted_s:.1f} s, at the end {[e['backlog'] for e in seen]} waited"
        text += f", {[end['drops'] for end in seen]} packets dropped"
        match self.kind:
            case "stop":
                most = HELD_BURST + STOPPED_BITS / 8 * self._lasted_s + 1500
                right = max(passed) <= most and any(end["backlog"] for end in seen)
            case "partition":
                right = max(passed) == 0 and any(end["drops"] for end in seen)
            case _:
                most = SLOW_BITS / 8 * self._lasted_s + 2 * 4096
                right = max(passed) <= most and any(end["overlimits"] for end in seen)
        assert right, f"no {self.kind}: {text}"
        return text


# ---- resets


def list_connections(pid: int, there: str) -> dict[str, tuple[str, str]]:
    """TCP connections of a process with an address: inode -> (own end, far end), as the kernel writes them."""
    far = f"{struct.unpack('=I', socket.inet_aton(there))[0]:08X}"
    found = {}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "01" and words[2].startswith(far):
            found[words[9]] = words[1], words[2]
    return found


def reset_connections(pid: int, inodes: Iterable[str]) -> int:
    """End those connections of a process with RST, at both ends; it is not asked. Returns how many there were."""
    wanted, libc, count = {f"socket:[{inode}]" for inode in inodes}, ctypes.CDLL(None, use_errno=True), 0
    handle = os.pidfd_open(pid)
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(link) in wanted:
                    copy = libc.syscall(PIDFD_GETFD, handle, int(link.name), 0)
                    if copy < 0:
                        raise OSError(ctypes.get_errno(), "pidfd_getfd")
                    # "Connect to nothing" is how a connection is ended with RST while others hold it, too.
                    count += libc.connect(copy, struct.pack("=H14x", socket.AF_UNSPEC), 16) == 0
                    os.close(copy)
    finally:
        os.close(handle)
    return count
