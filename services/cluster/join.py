"""Joins a Ray cluster that others started as the driver of a namespace, and says clearly why it cannot.

Ray itself tries for two minutes when nobody answers, and tells a wrong token only in its own log. So its head is asked
first, by the call that `ray health-check` makes.

A namespace has one driver at a time. Each driver has an entry of its own in Ray's key-value store, and looks for others
after it has made it: so of two that start at the same moment one goes on at most. The driver of an entry is a job of
Ray, which knows whether it lives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

import grpc
import msgspec
import psutil
import ray
import ray._private.utils
from ray._private.grpc_utils import init_grpc_channel
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import state as cluster_state
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.experimental import internal_kv
from ray.job_config import JobConfig

from diptych.errors import ConfigError, StartError

# What Ray's table of jobs says of this program.
ENTRYPOINT = "diptych serve"
# Seconds for an answer of Ray's head.
HEAD_TIMEOUT_S = 6.0
# Seconds for Ray to notice the end of an earlier driver, and between two looks: two drivers look at different times.
DRIVER_END_S, PAUSE_S = 5.0, (0.2, 0.8)
# Processes of the same id that began so many seconds apart, or less, are the same.
SAME_START_S = 2.0
LEAVES = "the deployment stops"
# Ray warns that it does not handle SIGTERM where it is joined in a thread. This program handles it.
logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
TOKEN_FIX = "give the cluster's token: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or the file ~/.ray/auth_token"


def join_cluster(head: str, namespace: str) -> None:
    """Connect this process, the driver, to the cluster whose head is at this address, and has been checked.

    Raises:
        StartError: it does not answer any more, or this machine is no node of it.
    """
    try:
        with _entrypoint_without_secrets():
            ray.init(
                address=head,
                namespace=namespace,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                # Marks the job as a remote client's: otherwise actors import from the working directory first.
                job_config=JobConfig(_client_job=True),
            )
    except Exception as error:
        # Ray has no common base class for the errors of its parts.
        raise StartError(
            f"the Ray cluster at {head} cannot be joined",
            _last_cause(error),
            "run diptych serve on a node of the cluster, with the Python and Ray that `ray start` was run with",
        ) from None


@contextlib.contextmanager
def _entrypoint_without_secrets() -> Iterator[None]:
    """While this lasts, Ray notes a job without its command line, which may have keys (--api-key, --admin-key).

    Ray's head keeps the command lines of all jobs, and shows them to whoever asks.
    """
    known = ray._private.utils.get_entrypoint_name
    ray._private.utils.get_entrypoint_name = lambda: ENTRYPOINT
    try:
        yield
    finally:
        ray._private.utils.get_entrypoint_name = known


def find_head(address: str) -> str:
    """The address of Ray's head: `address` itself, or for "auto" that of the cluster to which this machine belongs.

    Raises:
        ConfigError: the address has not the form HOST:PORT.
        StartError: this machine belongs to no cluster.
    """
    if address == "auto":
        try:
            found = os.environ.get("RAY_ADDRESS") or canonicalize_bootstrap_address("auto")
        except (ConnectionError, OSError):
            found = None
        if not found:
            raise StartError(
                "no Ray runs on this machine",
                "--ray-address auto joins the cluster whose node this machine is",
                "start a node here (ray start --address HEAD:6379), or give HOST:PORT of Ray's head",
            )
        address = found
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        raise ConfigError(
            f"--ray-address {address} is not the address of Ray's head",
            "it has the form HOST:PORT, for example 10.0.0.1:6379; Ray's client (ray://) is not used",
            "--ray-address auto on a node of the cluster",
        )
    return address


def check_head(address: str) -> None:
    """Ask Ray's head whether it is there, with this process's token and certificates.

    Raises:
        StartError: it does not answer, refuses the token, or has another version.
    """
    try:
        answer = _ask_head(address, HEAD_TIMEOUT_S)
    except ray.exceptions.AuthenticationError:
        raise StartError(
            f"the Ray cluster at {address} needs a token",
            "RAY_AUTH_MODE is token, and no token was found",
            TOKEN_FIX,
        ) from None
    except grpc.RpcError as error:
        raise _head_error(address, error) from None
    except OSError as error:
        raise StartError(
            f"Ray's certificates cannot be read for {address}",
            str(error),
            "set RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT as on the cluster's nodes",
        ) from None
    if answer.ray_version != ray.__version__:
        raise StartError(
            "the Ray cluster has another version of Ray",
            f"{address} runs Ray {answer.ray_version}, and here is Ray {ray.__version__}",
            "use the same version on all nodes",
        )


def head_is_open(address: str, timeout_s: float = HEAD_TIMEOUT_S) -> bool:
    """Whether Ray's head serves whoever asks, without a token and without TLS (with which Ray wants certificates)."""
    try:
        with grpc.insecure_channel(address) as channel:
            _check_alive(channel, timeout_s)
    except grpc.RpcError:
        return False
    return True


def head_answers(address: str, timeout_s: float = HEAD_TIMEOUT_S) -> bool:
    """Whether Ray's head answers now."""
    try:
        _ask_head(address, timeout_s)
    except (grpc.RpcError, ray.exceptions.RayError, OSError):
        return False
    return True


def _ask_head(address: str, timeout_s: float) -> Any:
    """The answer of Ray's head to CheckAlive."""
    with init_grpc_channel(address) as channel:
        return _check_alive(channel, timeout_s)


def _check_alive(channel: Any, timeout_s: float) -> Any:
    stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)  # type: ignore[no-untyped-call]
    # Made when it is imported, by the library for protocol buffers.
    question = gcs_service_pb2.CheckAliveRequest()  # type: ignore[attr-defined]
    return stub.CheckAlive(question, timeout=timeout_s)


def _head_error(address: str, error: Any) -> StartError:
    """The error for a call of the head that has failed."""
    code, details = error.code(), " ".join(str(error.details()).split())[:200]
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return StartError(f"the Ray cluster at {address} refuses this token", details, TOKEN_FIX)
    secured = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    tls = "with RAY_USE_TLS" if secured else "without TLS (RAY_USE_TLS is not set)"
    return StartError(
        f"no Ray head answers at {address}",
        f"asked {tls}: {details}",
        "name the head's GCS port, as in `ray start --address`, and set RAY_USE_TLS as on its nodes",
    )


def _last_cause(error: BaseException) -> str:
    """The first cause of an error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300]


class NamespaceClaim:
    """The claim of this process, which has joined Ray, to be the driver of a namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self.is_held = False

    def take_namespace(self, leaves: threading.Event) -> None:
        """Become the driver; blocks for some seconds if another one has it, which may have ended a moment ago.

        Raises:
            StartError: another living driver has this namespace, or `leaves` was set meanwhile.
        """
        deadline_s = time.monotonic() + DRIVER_END_S
        while True:
            holder = self._find_holder()
            if holder is None:
                self._put_entry()
                if self._find_holder() is None:
                    return
                self.release()
            elif _lives_here(holder) or time.monotonic() > deadline_s:
                raise StartError(
                    f"a deployment named {self._namespace} runs in this Ray cluster",
                    f"diptych serve, process {holder['pid']} on {holder['host']}, drives it",
                    "stop it, or name this one: --ray-namespace NAME",
                )
            if leaves.wait(random.uniform(*PAUSE_S)):
                raise StartError(LEAVES)

    def release(self) -> None:
        """Let another driver have the namespace."""
        self.is_held = False
        cast(Any, internal_kv)._internal_kv_del(self._key_of(_own_job()))

    def _put_entry(self) -> None:
        began_s = psutil.Process().create_time()
        entry = {"pid": os.getpid(), "host": socket.gethostname(), "began_s": began_s}
        internal_kv._internal_kv_put(self._key_of(_own_job()), msgspec.json.encode(entry), overwrite=True)
        self.is_held = True

    def _find_holder(self) -> dict[str, Any] | None:
        """The entry of another driver that lives; those of dead ones are removed."""
        store: Any = internal_kv
        jobs = [key.decode().rpartition(":")[2] for key in store._internal_kv_list(self._key_of(""))]
        dead = {job["JobID"]: job["IsDead"] for job in cast(Any, cluster_state).job_table()}
        for job in sorted(set(jobs) - {_own_job()}):
            if dead.get(job, True):
                store._internal_kv_del(self._key_of(job))
            elif raw := store._internal_kv_get(self._key_of(job)):
                found: dict[str, Any] = msgspec.json.decode(raw)
                return found
        return None

    def _key_of(self, job: str) -> str:
        """The key of a driver's entry; without a job, what the keys of all of this namespace begin with."""
        return f"diptych:driver:{self._namespace}:{job}"


def _own_job() -> str:
    """Ray's number for this driver."""
    return str(ray.get_runtime_context().get_job_id())


def _lives_here(driver: Mapping[str, Any]) -> bool:
    """Whether the process of a driver's entry is there, on this machine."""
    if driver["host"] != socket.gethostname():
        return False
    try:
        apart_s = abs(psutil.Process(driver["pid"]).create_time() - driver["began_s"])
    except psutil.Error:
        return False
    # The times of two looks may differ, as the system's boot time is rounded.
    return bool(apart_s < SAME_START_S)
