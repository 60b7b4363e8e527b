"""Lists the devices that the planner knows: peak rates, memory, links, prices, and the share of peaks that kernels get.

Peak rates come from the makers' data sheets (dense, without sparsity); memory is what drivers report. The source of
each `Efficiency` stands beside it. Prices are rounded on-demand prices of large clouds; users can set their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from diptych.errors import ConfigError
from diptych.specs import EMULATED
from planner.types import Count, LinkSpec, PeakShare, Positive, PositiveOrZero, Seconds

# The name of the device that stands for one CPU core, and the most cores of one machine.
CPU, MAX_CORES = "cpu", 1024


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A machine with several devices. `intra` links two of its devices, `inter` two machines (per device, one way)."""

    devices_per_node: Count = 8
    intra: LinkSpec = field(default_factory=LinkSpec)
    inter: LinkSpec = field(default_factory=LinkSpec)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of a device's peak rates the engine's kernels reach.

    Shares of the peak: `flops` in large matrix products, `attention` in prefill attention, `bytes` of the memory
    bandwidth, `link` of the link bandwidth in an all-reduce. Seconds: `layer_s` per layer and step (launching
    kernels), `step_s` per step, `reduce_s` latency of one all-reduce.
    """

    flops: PeakShare = 0.7
    attention: PeakShare = 0.4
    bytes: PeakShare = 0.8
    link: PeakShare = 0.6
    layer_s: Seconds = 20e-6
    step_s: Seconds = 1e-3
    reduce_s: Seconds = 10e-6


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. Rates are per second: `flops` with 16-bit operands, `flops8` with 8-bit ones (0: none)."""

    name: str
    flops: Positive
    bytes_per_s: Positive
    memory_bytes: Positive
    price_per_hour: PositiveOrZero
    node: NodeSpec = field(default_factory=NodeSpec)
    flops8: PositiveOrZero = 0.0
    gets: Efficiency = field(default_factory=Efficiency)

    @property
    def slots(self) -> int:
        """Devices that one machine is assumed to have if the user gives no number: many for CPU cores."""
        return MAX_CORES if self.name == CPU else self.node.devices_per_node

    def rate(self, weight_bytes: float) -> float:
        """Peak FLOP/s for weights of `weight_bytes` bytes each."""
        return self.flops8 if weight_bytes <= 1 and self.flops8 else self.flops


GB, TB, TFLOP = 1e9, 1e12, 1e12
MIB = float(1 << 20)
# Bytes of memory that CUDA reports for an A100-80G. The KV capacities in DistServe's artefact follow from it.
A100_BYTES = 84_990_623_744.0

# Sources. Hopper: the memory share 0.8 and the all-reduce latency of about 10 µs are "empirical" factors in
# AIConfigurator's system files (Apache-2.0). A100: 0.75 of the peak and 0.63 of the bandwidth follow from the slopes of
# DistServe's fits.
HOPPER = Efficiency()
AMPERE = Efficiency(flops=0.75, bytes=0.65, layer_s=30e-6, step_s=3e-3)
NVLINK4 = NodeSpec(8, LinkSpec(450 * GB, 10e-6), LinkSpec(50 * GB, 20e-6))
NVLINK5 = NodeSpec(8, LinkSpec(900 * GB, 10e-6), LinkSpec(100 * GB, 20e-6))
PCIE4 = NodeSpec(8, LinkSpec(32 * GB, 20e-6), LinkSpec(12.5 * GB, 30e-6))

DEVICES = {
    one.name.lower(): one
    for one in (
        # 25 Gb/s between nodes, as in DistServe's cluster, where KV therefore has to stay within a node.
        Device(
            "A100-80G", 312 * TFLOP, 2.039 * TB, A100_BYTES, 2.5,
            NodeSpec(8, LinkSpec(300 * GB, 10e-6), LinkSpec(3.125 * GB, 30e-6)), gets=AMPERE,
        ),
        Device("H100", 989 * TFLOP, 3.35 * TB, 81559 * MIB, 4.0, NVLINK4, 1979 * TFLOP, HOPPER),
        Device("H200", 989 * TFLOP, 4.8 * TB, 143771 * MIB, 5.0, NVLINK4, 1979 * TFLOP, HOPPER),
        Device("B200", 2250 * TFLOP, 7.7 * TB, 183359 * MIB, 8.0, NVLINK5, 4500 * TFLOP, HOPPER),
        Device("L40S", 362 * TFLOP, 0.864 * TB, 46068 * MIB, 1.8, PCIE4, 733 * TFLOP, replace(HOPPER, flops=0.55)),
        Device("A10G", 70 * TFLOP, 0.6 * TB, 23028 * MIB, 1.0, PCIE4, gets=AMPERE),
        Device(
            "MI300X", 1307 * TFLOP, 5.3 * TB, 196592 * MIB, 6.0,
            NodeSpec(8, LinkSpec(448 * GB, 15e-6), LinkSpec(50 * GB, 20e-6)), 2615 * TFLOP,
            replace(HOPPER, flops=0.45, bytes=0.7),
        ),
        # One core. The figures give an order of magnitude, until `diptych profile` has measured this machine.
        Device(
            CPU, 60e9, 10 * GB, 2048 * MIB, 0.05,
            NodeSpec(2, LinkSpec(4 * GB, 1e-4), LinkSpec(1 * GB, 2e-4)),
            gets=Efficiency(0.5, 0.2, 0.8, 0.5, 50e-6, 1e-3, 2e-4),
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

# Devices of the list that CUDA does not drive.
NOT_CUDA = ("mi300x",)


def list_gpus(names: Iterable[str]) -> list[str]:
    """Those of the named devices that are GPUs: all but CPU cores."""
    return sorted({name for name in names if not name.lower().startswith(CPU)})


def unserved_devices(names: Iterable[str]) -> list[str]:
    """Those of a deployment's devices on which its workers cannot compute: GPUs without CUDA, or beside CPU cores."""
    found = set(names)
    gpus = list_gpus(found)
    return gpus if len(gpus) < len(found) else [name for name in gpus if normalize_name(name) in NOT_CUDA]


def find_device(name: str, *own: Device) -> Device:
    """The device with this name, in any case: one of `own` (for example a profile's), else a built-in device.

    Raises:
        ConfigError: the device is not known; the error lists the known ones.
    """
    known = DEVICES | {normalize_name(one.name): one for one in own}
    found = known.get(normalize_name(name))
    if found is None:
        raise ConfigError(
            f"the device {name!r} is not known",
            "known: " + ", ".join(one.name for one in known.values()),
            "name one of these, or describe your own in a file for --profile (docs/planning.md, Files)",
        )
    return found


def served_device(names: Iterable[str]) -> Device:
    """The device of workers that name theirs so: a CPU core, or a GPU.

    Raises:
        ConfigError: they have several kinds of device, or one that is not known.
    """
    kinds = sorted(set(names))
    if len(kinds) > 1:
        raise ConfigError(
            f"workers compute on {' and '.join(kinds)}", "a profile is of one kind", "measure each by itself"
        )
    return find_device(CPU if kinds in ([], [EMULATED]) else kinds[0])


def normalize_name(name: str) -> str:
    """The name in the form that keys of `DEVICES` have: lower case, dashes, no maker, aliases resolved."""
    plain = (
        name.strip()
        .lower()
        .removeprefix("nvidia ")
        .replace("_", "-")
        .replace(" ", "-")
        .replace("-80gb", "-80g")
    )
    return ALIASES.get(plain, plain)
