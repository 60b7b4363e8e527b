"""Devices the planner knows: peak rates, memory, links, price, and how much of the peaks an engine gets.

Peaks are the makers' data sheets (dense, without sparsity); memory is what drivers report. `Yield` says which share of
the peaks real kernels reach; where it comes from is said beside each. Prices are round on-demand figures of large
clouds, to be replaced by one's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from diptych.errors import ConfigError
from planner.terms import Link

# A core of this machine, of which one machine has so many at most.
CPU, MOST_CORES = "cpu", 1024


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with several devices: `intra` joins two devices in it, `inter` two machines (per device, one way)."""

    devices_per_node: int = 8
    intra: Link = field(default_factory=Link)
    inter: Link = field(default_factory=Link)


@dataclass(frozen=True, slots=True)
class Yield:
    """What an engine gets out of a device.

    Shares of the peak: `flops` in large matrix products, `attention` in the attention of prompts, `bytes` of memory
    bandwidth, `link` of the link's bandwidth in an all-reduce. Seconds: `layer_s` per layer and step (kernels start
    and end), `step_s` per step, `reduce_s` the latency of one all-reduce.
    """

    flops: float = 0.7
    attention: float = 0.4
    bytes: float = 0.8
    link: float = 0.6
    layer_s: float = 20e-6
    step_s: float = 1e-3
    reduce_s: float = 10e-6


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `flops` are of 16-bit tensor operations, `flops8` of 8-bit ones (0: none, they run as 16)."""

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: float
    price_per_hour: float
    node: Node = field(default_factory=Node)
    flops8: float = 0.0
    gets: Yield = field(default_factory=Yield)

    @property
    def slots(self) -> int:
        """Devices that a node may have where nobody says how many: cores are of one machine, however many they are."""
        return MOST_CORES if self.name == CPU else self.node.devices_per_node

    def rate(self, weight_bytes: float) -> float:
        """Peak FLOP/s for weights of that width."""
        return self.flops8 if weight_bytes <= 1 and self.flops8 else self.flops


GB, TB, TFLOP = 1e9, 1e12, 1e12
MIB = float(1 << 20)
A100_BYTES = 84_990_623_744.0  # what a job sees of an A100-80G; the artefact's capacities follow from it

# Shares: memory 0.8, all-reduce latency about 10 µs (AIConfigurator's system files, Apache-2.0, "empirical" factors);
# A100: 0.75 of the peak and 0.63 of the bandwidth, from the slopes of DistServe's fits.
HOPPER = Yield()
AMPERE = Yield(flops=0.75, bytes=0.65, layer_s=30e-6, step_s=3e-3)
NVLINK4 = Node(8, Link(450 * GB, 10e-6), Link(50 * GB, 20e-6))
NVLINK5 = Node(8, Link(900 * GB, 10e-6), Link(100 * GB, 20e-6))
PCIE4 = Node(8, Link(32 * GB, 20e-6), Link(12.5 * GB, 30e-6))

DEVICES = {
    one.name.lower(): one
    for one in (
        # Between nodes 25 Gb/s: the paper's cluster, where KV must stay within a node.
        Device(
            "A100-80G", 312 * TFLOP, 2.039 * TB, A100_BYTES, 2.5,
            Node(8, Link(300 * GB, 10e-6), Link(3.125 * GB, 30e-6)), gets=AMPERE,
        ),
        Device("H100", 989 * TFLOP, 3.35 * TB, 81559 * MIB, 4.0, NVLINK4, 1979 * TFLOP, HOPPER),
        Device("H200", 989 * TFLOP, 4.8 * TB, 143771 * MIB, 5.0, NVLINK4, 1979 * TFLOP, HOPPER),
        Device("B200", 2250 * TFLOP, 7.7 * TB, 183359 * MIB, 8.0, NVLINK5, 4500 * TFLOP, HOPPER),
        Device("L40S", 362 * TFLOP, 0.864 * TB, 46068 * MIB, 1.8, PCIE4, 733 * TFLOP, replace(HOPPER, flops=0.55)),
        Device("A10G", 70 * TFLOP, 0.6 * TB, 23028 * MIB, 1.0, PCIE4, gets=AMPERE),
        Device(
            "MI300X", 1307 * TFLOP, 5.3 * TB, 196592 * MIB, 6.0,
            Node(8, Link(448 * GB, 15e-6), Link(50 * GB, 20e-6)), 2615 * TFLOP, replace(HOPPER, flops=0.45, bytes=0.7),
        ),
        # One core: an order of magnitude, until `diptych profile` has measured this machine.
        Device(
            CPU, 60e9, 10 * GB, 2048 * MIB, 0.05,
            Node(2, Link(4 * GB, 1e-4), Link(1 * GB, 2e-4)), gets=Yield(0.5, 0.2, 0.8, 0.5, 50e-6, 1e-3, 2e-4),
        ),
    )
}  # fmt: skip

ALIASES = {
    "a100": "a100-80g",
    "a100-sxm4-80g": "a100-80g",
    "h100-80g-hbm3": "h100",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "b200-sxm": "b200",
}


def device(name: str, *own: Device) -> Device:
    """The device of that name, in any case: one of `own`, such as a profile's, or else a built-in one.

    Raises:
        ConfigError: it is not known; the error lists those that are.
    """
    known = DEVICES | {_plain(one.name): one for one in own}
    found = known.get(_plain(name))
    if found is None:
        raise ConfigError(
            f"the device {name!r} is not known",
            "known: " + ", ".join(one.name for one in known.values()),
            "name one of these, or describe your own in a file for --profile (docs/planner.md, A profile as a file)",
        )
    return found


def _plain(name: str) -> str:
    """As it is in `DEVICES`."""
    plain = (
        name.strip()
        .lower()
        .removeprefix("nvidia ")
        .replace("_", "-")
        .replace(" ", "-")
        .replace("-80gb", "-80g")
    )
    return ALIASES.get(plain, plain)
