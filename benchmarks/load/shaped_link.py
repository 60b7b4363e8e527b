"""One prefill and one decode worker on hosts of their own, with a link for their KV whose rate can be set.

The hosts are network namespaces (`tests.support.network_namespaces`). KV goes over a cable of its own, by NIXL over
TCP; the channel to the gateway goes over the bridge and is not shaped. Needs root and the tools `ip`, `bridge` and
`tc`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.engine import EMBEDDED
from diptych.channel.keys import make_keys
from diptych.eviction_spec import KeepSpec
from diptych.specs import GatewaySpec, WorkerSpec
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import expand_auto
from services.host.child_environment import child_environment
from services.host.ports import claim_port
from services.host.supervision.supervisor import Supervisor, start_error
from tests.support.kv_cables import KvCable
from tests.support.network_namespaces import NamespaceBridge

READY_S, STOP_S = 300.0, 5.0
# Bytes that pass a shaped end at once: what its rate sends in a millisecond, but at least a few packets.
BURST_S, MIN_BURST_BYTES = 1e-3, 16 << 10
# The queue in front of the link drops packets that would wait for longer.
QUEUE = "latency 50ms"
# UCX uses the cable alone, and no shared memory.
UCX = {"UCX_TLS": "tcp,self", "UCX_LOG_LEVEL": "fatal"}


def link_shape(mbit_per_s: float) -> str:
    """The arguments of `tc`'s token bucket for a link of this rate."""
    bits_per_s = round(mbit_per_s * 1e6)
    burst = max(MIN_BURST_BYTES, round(bits_per_s / 8 * BURST_S))
    return f"rate {bits_per_s}bit burst {burst} {QUEUE}"


def split_column(column: str) -> tuple[str, float]:
    """The codec and the threshold of eviction: ("nuq3-1%", 0.95) of "nuq3-1%.keep0.95". Without `.keep` it is 1.

    So `system_fingerprint` ends, too. Raises ValueError if the threshold is not above 0 and at most 1.
    """
    codec, _, threshold = column.partition(".keep")
    return codec, KeepSpec(float(threshold or 1)).threshold


class ShapedDeployment:
    """A gateway and two workers of the embedded model with a KV codec, or several; `cable` is the link of their KV.

    `column` is the codec as the user names it, `auto` included, and with a threshold of eviction if there is one, as
    `split_column` reads it. `fields` are more of `WorkerSpec`, `module` is what runs as a worker.
    """

    def __init__(
        self,
        net: NamespaceBridge,
        folder: Path,
        column: str,
        number: int,
        fields: Mapping[str, Any] | None = None,
        module: str = "services.worker",
    ) -> None:
        self.column, self.port = column, claim_port("127.0.0.1", 0)
        codec, threshold = split_column(column)
        codec = expand_auto(Checkpoint.resolve(str(EMBEDDED)), codec)
        make_keys(folder / "keys")
        self._folder, self._codec, self._shaped = folder, codec, False
        channel = f"tcp://{net.address}:{claim_port(net.address, 0)}"
        gateway = GatewaySpec(
            host="127.0.0.1",
            port=self.port,
            channel=channel,
            keys_dir=str(folder / "keys"),
            model=str(EMBEDDED),
            served_names=("tiny",),
            num_prefill=1,
            num_decode=1,
            kv_keep=threshold,
        )
        environ = child_environment(1, os.environ) | UCX | {"UCX_NET_DEVICES": f"kv{number}"}
        self._parts = [self._supervise("gateway", "services.gateway", gateway, [], environ)]
        hosts = []
        for role in ("prefill", "decode"):
            hosts.append(host := net.house())
            spec = WorkerSpec(
                worker=f"{role}-0",
                role=role,
                gateway=channel,
                keys_dir=str(folder / "keys"),
                model=str(EMBEDDED),
                kv_cache_codec=codec,
                kv_keep=threshold,
                transports=("nixl",),
                host=host.address,
                **(fields or {}),
            )
            self._parts.append(self._supervise(spec.worker, module, spec, host.command([]), environ))
        self.cable = KvCable(hosts[0], hosts[1], number)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start all processes, and return when the deployment is ready. Raises StartError or TimeoutError."""
        for part in self._parts:
            part.start()
        deadline_s = time.monotonic() + READY_S
        while not self._is_ready():
            for part in self._parts:
                if (status := part.status()).state == "failed":
                    raise start_error(status, self._folder / f"{part.name}.log")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.column}: not ready after {READY_S:.0f} s")
            time.sleep(0.5)

    def shape_link(self, mbit_per_s: float) -> None:
        """From now on KV passes at this rate, each way."""
        self.cable.shape_traffic("change" if self._shaped else "add", link_shape(mbit_per_s))
        self._shaped = True

    def moved_bytes(self) -> int:
        """Bytes that have left the prefill worker over the cable since its rate was set for the first time."""
        return int(self.cable.tc_statistics()[0]["bytes"])

    def stop(self) -> None:
        """End all processes. Idempotent."""
        for part in self._parts:
            part.stop(STOP_S)

    def _supervise(
        self,
        name: str,
        module: str,
        spec: GatewaySpec | WorkerSpec,
        prefix: list[str],
        environ: dict[str, str],
    ) -> Supervisor:
        command = [*prefix, sys.executable, "-m", module]
        return Supervisor(name, command, msgspec.json.encode(spec), self._folder / f"{name}.log", environ)

    def _is_ready(self) -> bool:
        try:
            if httpx.get(f"{self.url}/ready", timeout=10).status_code != 200:
                return False
            return bool(httpx.get(f"{self.url}/status", timeout=10).json()["links"])
        except httpx.TransportError:
            return False


@contextmanager
def shaped_deployments(net: NamespaceBridge, columns: list[str]) -> Iterator[list[ShapedDeployment]]:
    """A deployment per column, all of them running and ready; at the end nothing of them is left."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        deployments = []
        for number, column in enumerate(columns):
            own = Path(folder) / str(number)
            own.mkdir()
            deployments.append(deployment := ShapedDeployment(net, own, column, number))
            running.callback(deployment.stop)
            deployment.start()
        yield deployments
