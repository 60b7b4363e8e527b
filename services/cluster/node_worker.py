"""The actor that Ray places on a node for a worker: it learns from the node what the worker needs, and keeps it alive.

    order (what the driver knows) + address, cores, memory, model folder, network device, log, keys (from this node)
        = `WorkerSpec` ──▶ Supervisor ──▶ worker process

The actor is detached: it lives on when the driver ends, and the next driver adopts it. If its node is lost, Ray starts
it on another one, where it learns everything anew. The keys reach it sealed for a key pair that it makes itself, or lie
in a folder of the node; it never has the gateway's secret key.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import ray
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from diptych.channel.keys import (
    WORKER_FILES,
    KeyBackup,
    load_transfer_key,
    load_worker_keys,
    write_worker_keys,
)
from diptych.errors import DiptychError, ModelError
from diptych.specs import WorkerSpec
from services.cluster.node_probe import describe_node, name_deployment, node_error
from services.cluster.sealed_keys import open_keys
from services.host.core_claims import CoreClaim
from services.host.gpu_probe import GpuShare
from services.host.held_memory import WORKER_OF
from services.host.network import UCX_DEVICES, ucx_listen_environment
from services.host.supervision.supervisor import ChildStatus, ErrorReport, Supervisor
from services.host.vllm.interpreter import worker_command, worker_environment

KEY_FOLDER = "diptych-keys-"
# A key folder that is younger may not have been locked yet.
MIN_AGE_S = 60.0
# Seconds for a download of the model. The driver of a first start may give up earlier.
MODEL_TIMEOUT_S = 3600.0
# States of a supervisor in which its worker is not started again.
ENDED_STATES = ("failed", "retired", "stopped")
# Versions of statuses before there is a supervisor, whose versions are not negative, lie below this.
FAILED_STARTS_VERSION = -10


def retry_delay_s(failures: int) -> float:
    """Seconds before the next try to start a worker on a node: 5 s after the first failure, doubling up to a minute."""
    # With a bound, since a power of thousands is no float.
    return float(min(5.0 * 2 ** min(failures - 1, 10), 60.0))


class NodeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor is told: the worker's specification as far as the driver knows it, and where it is placed.

    `group` is the name of its placement group, in which it has the bundle `index` with the resources `demand`.
    `cpus` are those of the smallest worker: by them each node counts how many workers share its memory. For
    `question`, `max_workers`, `keys_dir` and `pin_cores` see `services.cluster.spec.ClusterSpec`. `gateway_key` is the
    gateway's public key: a worker that has another one cannot be adopted.
    """

    spec: WorkerSpec
    module: str
    namespace: str
    question: str
    max_workers: int
    cpus: float
    keys_dir: str
    gateway_key: str
    pin_cores: bool
    group: str
    index: int
    demand: dict[str, float]

    def is_like(self, other: NodeOrder) -> bool:
        """Whether a worker that was started with `other` is what this order asks for, wherever it was placed."""
        names = ("spec", "module", "question", "keys_dir", "gateway_key", "pin_cores", "demand")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def key_context(self) -> str:
        """What sealed keys are bound to."""
        return f"{self.namespace}/{self.spec.worker}"


class FoundModel(msgspec.Struct, frozen=True):
    """The part of the node's answer about the model that its worker needs."""

    path: str
    max_model_len: int
    kv_bytes: int
    kv_cache_codec: str = ""
    gpu: GpuShare | None = None


@dataclass(frozen=True, slots=True)
class ActorReport:
    """A worker's status with where it runs. `wanted_key` is a public key for which keys are to be sealed, or empty."""

    pid: int
    status: ChildStatus
    address: str
    log_file: str
    wanted_key: bytes


class NodeWorker:
    """Keeps one worker process alive on the node where Ray has placed it."""

    def __init__(self, order: bytes) -> None:
        self._order = msgspec.json.decode(order, type=NodeOrder)
        name = self._order.spec.worker
        self._restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._address = str(cast(Any, ray.util).get_node_ip_address())
        self._deployment = name_deployment(self._order.namespace, self._address)
        self._log = _ray_log_folder() / f"diptych-{self._order.namespace}-{name}.log"
        self._private = X25519PrivateKey.generate()
        self._sealed: dict[str, bytes] | None = None
        self._folder: Path | None = None
        self._claim = CoreClaim()
        self._status = ChildStatus(name)
        self._supervisor: Supervisor | None = None
        self._stopping = False
        # Guards the attributes above, and reports their changes.
        self._changed = threading.Condition()
        self._starter = threading.Thread(target=self._start_until_stopped, name=f"start {name}", daemon=True)
        self._starter.start()

    # --- called by the driver ---

    def describe_order(self) -> tuple[bytes, str, bool]:
        """The order with which this actor was made, its node's address, and whether its worker has ended for good."""
        with self._changed:
            supervisor, state = self._supervisor, self._status.state
        state = state if supervisor is None else supervisor.status().state
        ended = self._stopping or state in ENDED_STATES
        return msgspec.json.encode(self._order), self._address, ended

    def wait_status(self, version: int, timeout_s: float) -> ActorReport:
        """The status once its version is not `version`, or after `timeout_s`."""
        with self._changed:
            if self._supervisor is None:
                self._changed.wait_for(
                    lambda: self._supervisor is not None or self._status.version != version, timeout_s
                )
                return self._report(self._status)
            supervisor = self._supervisor
        return self._report(supervisor.wait_status(version, timeout_s))

    def deliver_keys(self, sealed: bytes) -> None:
        """Take the keys that were sealed for this actor's public key. Raises ConfigError if they cannot be opened."""
        keys = open_keys(sealed, self._private, self._order.key_context)
        with self._changed:
            self._sealed = keys
            self._changed.notify_all()

    def stop(self, grace_s: float) -> None:
        """Stop the worker and wait for its end; kill it after `grace_s` seconds. Nothing is started any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._starter.join()
        if self._supervisor is not None:
            self._supervisor.stop(grace_s)
        self._claim.release()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- the start ---

    def _report(self, status: ChildStatus) -> ActorReport:
        wanted = (
            b"" if self._order.keys_dir or self._sealed else self._private.public_key().public_bytes_raw()
        )
        return ActorReport(os.getpid(), status, self._address, str(self._log), wanted)

    def _start_until_stopped(self) -> None:
        """Start the worker. An error is the status "failed" at a first start, which its driver awaits.

        An actor that Ray has restarted, perhaps on another node, tries until it succeeds or is stopped: the node may
        lack memory or the model only for a while, and nobody else would try.
        """
        failures = 0
        while (report := self._try_start()) is not None:
            failures += 1
            self._fail(report, failures)
            if not self._restarted or self._wait_stopping(retry_delay_s(failures)):
                return

    def _try_start(self) -> ErrorReport | None:
        """Start the worker; None if it was started or stopped, else why it was not."""
        try:
            self._start_worker()
        except DiptychError as error:
            shown = node_error(self._address, error)
            return ErrorReport(shown.what, shown.why, shown.fix)
        except Exception as error:
            # For example no memory or no disk left.
            why = f"{type(error).__name__}: {error}"
            return ErrorReport(f"{self._order.spec.worker} cannot start on the node {self._address}", why)
        return None

    def _fail(self, report: ErrorReport, failures: int) -> None:
        """Set the status after so many failures in a row."""
        name, version = self._order.spec.worker, FAILED_STARTS_VERSION - failures
        failed = ChildStatus(name, "failed", error=report, version=version)
        if self._restarted:
            why = f"it cannot be started: {report.what}" + (f": {report.why}" if report.why else "")
            failed = ChildStatus(
                name, "waiting", restarts=failures, crashes=failures, ended=why, version=version
            )
        with self._changed:
            self._status = failed
            self._changed.notify_all()

    def _wait_stopping(self, timeout_s: float) -> bool:
        """Whether the worker is to be stopped, after `timeout_s` seconds or as soon as it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, timeout_s)

    def _start_worker(self) -> None:
        """Learn everything from this node, wait for the keys, and start the supervisor.

        Raises:
            DiptychError: the node lacks the model, memory or keys.
        """
        order, found = self._order, self._find_model()
        keys_dir = order.keys_dir or self._await_keys()
        if not keys_dir:
            # It was stopped meanwhile.
            return
        load_worker_keys(keys_dir)
        load_transfer_key(keys_dir)
        gpu = found.gpu or GpuShare(1, 0)
        spec = msgspec.structs.replace(
            order.spec,
            keys_dir=keys_dir,
            model=found.path,
            max_model_len=found.max_model_len,
            kv_bytes=found.kv_bytes,
            gpu_workers=gpu.workers,
            emulated_bytes=gpu.emulated_bytes,
            transfer_buffer_bytes=gpu.buffer_bytes,
            kv_cache_codec=found.kv_cache_codec or order.spec.kv_cache_codec,
            host=self._address,
            core=self._take_core(),
            # The previous worker has ended together with its supervisor, or is on a lost node.
            ended="killed" if self._restarted else "",
            log_file=str(self._log),
        )
        environ = worker_environment(spec, os.environ) | {WORKER_OF: self._deployment}
        if environ.get(UCX_DEVICES) == "lo" and self._address != "127.0.0.1":
            # Other nodes do not reach the loopback interface.
            del environ[UCX_DEVICES]
        supervisor = Supervisor(
            spec.worker,
            worker_command(spec, order.module),
            msgspec.json.encode(spec),
            self._log,
            ucx_listen_environment(environ, self._address),
            prepare=self._key_writer(keys_dir),
            restarted=self._restarted,
        )
        with self._changed:
            if self._stopping:
                return
            self._supervisor = supervisor
            supervisor.start()
            self._changed.notify_all()

    def _find_model(self) -> FoundModel:
        """The model on this node, with the memory that its workers get. Raises ModelError if it is not there."""
        order = self._order
        reply = describe_node(
            order.question,
            order.max_workers,
            order.cpus,
            _count_cpus(),
            self._deployment,
            MODEL_TIMEOUT_S,
        )["reply"]
        if error := reply.get("error"):
            raise ModelError(error["what"], error.get("why", ""), error.get("fix", ""))
        return msgspec.convert(reply["model"], FoundModel)

    def _await_keys(self) -> str:
        """Wait for the sealed keys and write them into a private folder of this node; "" if stopped before."""
        with self._changed:
            self._changed.wait_for(lambda: self._sealed is not None or self._stopping)
            if self._stopping or self._sealed is None:
                return ""
        if self._folder is None:
            _remove_old_folders()
            self._folder = Path(tempfile.mkdtemp(prefix=KEY_FOLDER))
            # Held until this process ends.
            _lock_folder(self._folder)
        write_worker_keys(self._folder, self._sealed)
        return str(self._folder)

    def _key_writer(self, keys_dir: str) -> Callable[[], None]:
        """What runs before each start of the worker: keys that were sent are written again if they are gone."""
        if self._sealed is None:
            return KeyBackup(keys_dir, WORKER_FILES).restore_keys
        keys = self._sealed
        return lambda: write_worker_keys(keys_dir, keys)

    def _take_core(self) -> int | None:
        """The first of the cores that the worker computes on; None if it is not pinned, or all are taken."""
        spec = self._order.spec
        if not self._order.pin_cores or spec.threads > 1 or "GPU" in self._order.demand:
            return None
        # Those of an earlier try.
        self._claim.release()
        return self._claim.take_cores(spec.tp * spec.pp, sorted(os.sched_getaffinity(0)))


def _ray_log_folder() -> Path:
    """The folder of Ray's logs on this node, which Ray's own tools list."""
    node: Any = ray._private.worker.global_worker.node
    return Path(node.get_logs_dir_path())


def _count_cpus() -> float:
    """The CPUs that Ray may give out on this node."""
    own = ray.get_runtime_context().get_node_id()
    return float(
        next(node["Resources"].get("CPU", 0) for node in cast(Any, ray).nodes() if node["NodeID"] == own)
    )


def _remove_old_folders() -> None:
    """Remove key folders of actors that were killed: nobody holds their locks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{KEY_FOLDER}*"):
        with suppress(OSError):
            found = folder.stat()
            old = time.time() - found.st_mtime > MIN_AGE_S
            if old and found.st_uid == os.geteuid() and (lock := _lock_folder(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock_folder(folder: Path) -> int | None:
    """The descriptor of a folder that is locked until it is closed; None if another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
