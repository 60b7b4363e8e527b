"""Hosts of their own for parts of a deployment: network namespaces on one bridge. A cut there is silent.

The bridge is in a namespace of its own, too: a firewall filters what a bridge of its namespace forwards, and that of a
container engine drops it.

    with running() as net:
        house = net.house()                                  # has an address of its own
        process = subprocess.Popen(house.command([...]))     # lives there; /proc and shared memory are as outside
        cut = house.cut(); ...; cut.verify(); cut.heal()

Nobody is informed of a cut: no FIN, no RST, no ICMP, no carrier lost. Needs root and the tools `ip`, `bridge` and `tc`;
`why_unavailable()` says what this machine lacks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

PREFIX = "dpt"
SLOW_LATENCY = "600ms"  # for how long a packet waits in front of a slow link before it is dropped
BURST_BYTES = 4096
_numbers = itertools.count()


def run_command(*command: str) -> str:
    """Standard output of a command. Raises CalledProcessError."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@cache
def why_unavailable() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not all(map(shutil.which, ("ip", "bridge", "tc"))):
        return "network namespaces need the commands ip, bridge and tc"
    try:
        with running_bridge() as net:
            house = net.house()
            house.slow(64_000).heal()
            house.cut().heal()
    except (subprocess.CalledProcessError, OSError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        return f"network namespaces are not possible here: {' '.join(reason.split())}"
    return ""


class PartitionFault:
    """A silent partition of one house from all others."""

    def __init__(self, house: NamespaceHost) -> None:
        self.house, self._healed = house, False
        run_command("bridge", "-n", house.net.hub, "link", "set", "dev", house.port, "state", "0")
        time.sleep(0.05)  # what was on its way over the bridge has arrived
        self._cut = house.counters()

    def verify(self) -> dict[str, int]:
        """Packets since the cut that the house has sent and got, and that were to go from out here to some house.

        Raises:
            AssertionError: it has got one, or none was sent at either end (then nobody would have missed any).
        """
        now = self._over if self._healed else self.house.counters()
        counts = {name: now[name] - self._cut[name] for name in now}
        assert counts["sent"] + counts["tried"] > 0 and counts["got"] == 0, f"no partition: {counts}"
        return counts

    def heal(self) -> None:
        if not self._healed:
            self._over = self.house.counters()
            run_command(
                "bridge", "-n", self.house.net.hub, "link", "set", "dev", self.house.port, "state", "3"
            )
            self._healed = True


class SlowLinkFault:
    """A link of so many bits a second, both ways."""

    def __init__(self, house: NamespaceHost, bits_per_s: int, queue: str) -> None:
        self.house, self.bits_per_s, self._began_s = house, bits_per_s, time.monotonic()
        shape = [
            "root",
            "tbf",
            "rate",
            f"{bits_per_s}bit",
            "burst",
            str(BURST_BYTES),
            "latency",
            queue,
        ]
        run_command("tc", "-n", house.net.hub, "qdisc", "add", "dev", house.port, *shape)
        run_command(*house.command(["tc", "qdisc", "add", "dev", "eth0", *shape]))
        self._healed: dict[str, float] | None = None

    def verify(self) -> dict[str, float]:
        """Bytes sent each way, how often a packet had to wait, and the seconds it lasted.

        Raises:
            AssertionError: nothing had to wait, or more got through than should.
        """
        counts = self._healed or self._read_counts()
        most = self.bits_per_s / 8 * counts["lasted_s"] + 2 * BURST_BYTES
        assert counts["waited"] > 0 and max(counts["out"], counts["back"]) <= most, f"no slow link: {counts}"
        return counts

    def held_anything(self) -> bool:
        """Whether any packet had to wait by now."""
        return self._read_counts()["waited"] > 0

    def _read_counts(self) -> dict[str, float]:
        here = run_command("tc", "-n", self.house.net.hub, "-s", "qdisc", "show", "dev", self.house.port)
        there = run_command(*self.house.command(["tc", "-s", "qdisc", "show", "dev", "eth0"]))
        lasted_s = time.monotonic() - self._began_s
        (out, waited), (back, held) = _parse_tc(here), _parse_tc(there)
        return {"out": out, "back": back, "waited": waited + held, "lasted_s": lasted_s}

    def heal(self) -> None:
        if self._healed is None:
            self._healed = self._read_counts()
            run_command("tc", "-n", self.house.net.hub, "qdisc", "del", "dev", self.house.port, "root")
            run_command(*self.house.command(["tc", "qdisc", "del", "dev", "eth0", "root"]))


def _read_device(device: str, *where: str) -> tuple[str, int, int]:
    """Address, packets received and packets sent of a device; `where` is "-n" and a namespace, or nothing."""
    (found,) = json.loads(run_command("ip", *where, "-s", "-j", "link", "show", "dev", device))
    counts = found["stats64"]
    return found["address"], counts["rx"]["packets"], counts["tx"]["packets"]


def _parse_tc(output: str) -> tuple[int, int]:
    """Bytes sent and packets that had to wait, in what tc tells of a token bucket."""
    found = re.search(r"Sent (\d+) bytes .*overlimits (\d+)", output)
    assert found is not None, output
    return int(found[1]), int(found[2])


class NamespaceHost:
    """One namespace; `port` is its plug in the bridge."""

    def __init__(self, net: NamespaceBridge, number: int) -> None:
        self.net, self.address = net, f"{net.subnet}.{number + 2}"
        self.name, self.port = f"{net.name}-{number}", f"{net.name}p{number}"
        far = f"{net.name}e{number}"
        run_command("ip", "netns", "add", self.name)
        run_command("ip", "-n", net.hub, "link", "add", self.port, "type", "veth", "peer", "name", far)
        run_command("ip", "-n", net.hub, "link", "set", far, "netns", self.name, "name", "eth0")
        net.plug_in(self.port)
        inside = [["addr", "add", f"{self.address}/24", "dev", "eth0"]]
        inside += [["link", "set", "eth0", "up"], ["link", "set", "lo", "up"]]
        run_command(*self.command(["sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"]))
        for words in inside:
            run_command("ip", "-n", self.name, *words)
        self._mac, _, _ = _read_device("eth0", "-n", self.name)
        # Neighbours are known for good: else a cut would be reported to the sender as an unanswered ARP.
        known = ["lladdr", self._mac, "dev", net.outer, "nud", "permanent"]
        run_command("ip", "neigh", "replace", self.address, *known)
        known = ["lladdr", net.mac, "dev", "eth0", "nud", "permanent"]
        run_command("ip", "-n", self.name, "neigh", "replace", net.address, *known)
        for other in net.houses:
            for one, two in ((self, other), (other, self)):
                known = ["lladdr", two._mac, "dev", "eth0", "nud", "permanent"]
                run_command("ip", "-n", one.name, "neigh", "replace", two.address, *known)

    def command(self, words: Sequence[str]) -> list[str]:
        """A command that runs in this house."""
        return ["ip", "netns", "exec", self.name, *words]

    def counters(self) -> dict[str, int]:
        """Packets that have left the house, that have come to it, and that the outer end has sent to any house."""
        _, sent, got = _read_device(self.port, "-n", self.net.hub)
        _, _, tried = _read_device(self.net.outer)
        return {"sent": sent, "got": got, "tried": tried}

    def cut(self) -> PartitionFault:
        """From now on no packet comes in or goes out, and nobody is informed."""
        return PartitionFault(self)

    def slow(self, bits_per_s: int, queue: str = SLOW_LATENCY) -> SlowLinkFault:
        """From now on the link has this rate, each way; packets wait for so long before they are dropped."""
        return SlowLinkFault(self, bits_per_s, queue)

    def close(self) -> None:
        run_command("ip", "-n", self.net.hub, "link", "del", self.port)
        run_command("ip", "netns", "del", self.name)


class NamespaceBridge:
    """A bridge in the namespace `hub`, the houses on it, and `outer`: the outer namespace's plug, with an address."""

    def __init__(self) -> None:
        # With "p12" behind it a name has 15 characters, as many as there may be.
        self.name = f"{PREFIX}{os.getpid()}x{next(_numbers)}"
        self.hub, self.outer = f"{self.name}-hub", f"{self.name}o"
        self.houses: list[NamespaceHost] = []
        taken = set(re.findall(r"inet (\d+\.\d+\.\d+)\.", run_command("ip", "-4", "addr")))
        self.subnet = next(net for n in range(256) if (net := f"10.{213 + n // 16}.{n % 16}") not in taken)
        self.address = f"{self.subnet}.1"
        run_command("ip", "netns", "add", self.hub)
        try:
            self._connect()
        except BaseException:
            run_command("ip", "netns", "del", self.hub)
            raise

    def _connect(self) -> None:
        """Make the bridge, and plug the outer namespace in."""
        inside = ["ip", "-n", self.hub, "link"]
        run_command(*inside, "add", "bridge", "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
        run_command(*inside, "set", "bridge", "addrgenmode", "none", "up")
        plug = f"{self.name}p"
        run_command(
            "ip", "link", "add", self.outer, "type", "veth", "peer", "name", plug, "netns", self.hub
        )  # fmt: skip
        run_command("ip", "addr", "add", f"{self.address}/24", "dev", self.outer)
        run_command("ip", "link", "set", self.outer, "addrgenmode", "none", "up")
        self.plug_in(plug)
        self.mac, _, _ = _read_device(self.outer)

    def plug_in(self, port: str) -> None:
        """Put a device of the hub on the bridge. Without IPv6: nothing but what the parts say is to be counted."""
        run_command(
            "ip", "-n", self.hub, "link", "set", port, "master", "bridge", "addrgenmode", "none", "up"
        )

    def house(self) -> NamespaceHost:
        """Another host on the bridge."""
        house = NamespaceHost(self, len(self.houses))
        self.houses.append(house)
        return house

    def close(self) -> None:
        for house in self.houses:
            with contextlib.suppress(subprocess.CalledProcessError):
                house.close()
        run_command("ip", "link", "del", self.outer)
        run_command("ip", "netns", "del", self.hub)


def remove_leftovers() -> None:
    """Remove what test processes have left behind that were killed."""
    # A list of links names the namespaces of their other ends, too. Links first: they end later than their namespace.
    found = {
        "link": (run_command("ip", "link"), "o"),
        "netns": (run_command("ip", "netns", "list"), r"-(?:\d+|hub)"),
    }
    for kind, (listing, end) in found.items():
        for name, pid in set(re.findall(rf"\b({PREFIX}(\d+)x\d+{end})\b", listing)):
            if not Path(f"/proc/{pid}").exists():
                # Another test process may remove it at the same time.
                with contextlib.suppress(subprocess.CalledProcessError):
                    run_command("ip", kind, "del", name)


@contextmanager
def running_bridge() -> Iterator[NamespaceBridge]:
    """A bridge without houses; at the end nothing of it is left."""
    remove_leftovers()
    net = NamespaceBridge()
    try:
        yield net
    finally:
        net.close()


def talks(house: NamespaceHost, address: str) -> bool:
    """Whether an answer comes back from there: a connection to a port without a listener is refused at once."""
    script = f"import socket; socket.create_connection(('{address}', 9), 10)"
    done = subprocess.run(house.command([sys.executable, "-c", script]), capture_output=True, text=True)
    return "ConnectionRefusedError" in done.stderr
