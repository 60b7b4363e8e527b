"""A deployment in network namespaces: each worker in a house of its own, a cable for the KV of each pair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from diptych.specs import GatewaySpec, WorkerSpec
from services.host.ports import claim_port
from services.host.supervision.supervisor import Supervisor
from tests.faults.fault_deployment import DeploymentShape, FaultDeployment
from tests.faults.inject import FaultUnproven, holds_in_time
from tests.support import network_namespaces
from tests.support.kv_cables import CableFault, KvCable, list_connections, reset_connections
from tests.support.network_namespaces import NamespaceBridge, NamespaceHost


class NamespaceDeployment(FaultDeployment):
    """The gateway is out here, on the bridge."""

    def __init__(
        self,
        folder: Path,
        shape: DeploymentShape,
        net: NamespaceBridge,
        address_of: Callable[[str, str], str] = lambda worker, real: real,
    ) -> None:
        self.net = net
        self.houses: dict[str, NamespaceHost] = {}
        super().__init__(folder, shape, address_of)
        self.cables = {
            f"{prefill}~{decode}": KvCable(self.houses[prefill], self.houses[decode], number)
            for number, (prefill, decode) in enumerate(self._pairs())
        }

    def _pairs(self) -> list[tuple[str, str]]:
        prefill, decode = ([name for name in self.names if name.startswith(role)] for role in ("p", "d"))
        return [(one, other) for one in prefill for other in decode]

    def _gateway(self) -> GatewaySpec:
        self.channel = f"tcp://{self.net.address}:{claim_port(self.net.address, 0)}"
        return super()._gateway()

    def _worker(self, name: str, address: str) -> WorkerSpec:
        house = self.houses[name] = self.net.house()
        return msgspec.structs.replace(super()._worker(name, self.channel), host=house.address)

    def _supervise(self, name: str, module: str, spec: WorkerSpec | GatewaySpec) -> Supervisor:
        part = super()._supervise(name, module, spec)
        if name in self.houses:
            part._command = self.houses[name].command(part._command)
            devices = ",".join(f"kv{number}" for number, pair in enumerate(self._pairs()) if name in pair)
            part._environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": devices, "UCX_LOG_LEVEL": "fatal"}
        return part


@contextmanager
def running_deployment(folder: Path, shape: DeploymentShape) -> Iterator[NamespaceDeployment]:
    """A village that is ready; at the end nothing of it is left."""
    with network_namespaces.running_bridge() as net:
        village = NamespaceDeployment(folder, shape, net)
        try:
            village.start()
            yield village
        finally:
            village.stop()


class CableFaultOfPair:
    """The cable of a pair (`target` is "prefill-0~decode-1") stands still, drops everything, or is slow."""

    def __init__(self, village: NamespaceDeployment, target: str, kind: str) -> None:
        self.village, self.target, self.kind = village, target, kind
        self._choke: CableFault | None = None

    def strike(self) -> None:
        self._choke = CableFault(self.village.cables[self.target], self.kind)

    def heal(self) -> None:
        assert self._choke is not None
        self._choke.heal()

    def verify(self) -> str:
        try:
            assert self._choke is not None, "it was never struck"
            return f"{self.target}: {self._choke.verify()}"
        except AssertionError as error:
            raise FaultUnproven(str(error)) from error


class ResetFault:
    """RST at both ends of a pair's connections, in the middle of reads: until then the cable is slow."""

    def __init__(self, village: NamespaceDeployment, target: str) -> None:
        self.village, self.target = village, target
        self._choke: CableFault | None = None
        self._ends: dict[str, tuple[str, str]] = {}
        self._count, self._gone, self._waited = 0, False, 0

    def strike(self) -> None:
        self._choke = CableFault(self.village.cables[self.target], "slow")

    def heal(self) -> None:
        assert self._choke is not None
        there, pid = self._choke.cable.addresses[0], self.village.pid(self.target.split("~")[1])
        self._waited = sum(end["backlog"] for end in self._choke.cable.tc_statistics())
        self._ends = list_connections(pid, there)
        self._count = reset_connections(pid, self._ends)
        self._choke.heal()
        time.sleep(0.1)
        self._gone = holds_in_time(lambda: not self._ends.keys() & list_connections(pid, there).keys(), 5.0)

    def verify(self) -> str:
        if not self._count or not self._gone:
            raise FaultUnproven(f"{self._count} of {len(self._ends)} connections of {self.target} were reset")
        return (
            f"{self._count} connections of {self.target} reset while {self._waited} bytes waited on the cable"
        )


def make_link_fault(village: FaultDeployment, kind: str, target: str) -> CableFaultOfPair | ResetFault:
    """The fault of that name at the link of a pair."""
    assert isinstance(village, NamespaceDeployment), "links are only of their own in a village"
    return ResetFault(village, target) if kind == "kill" else CableFaultOfPair(village, target, kind)
