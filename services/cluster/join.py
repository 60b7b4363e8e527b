"""Joins a Ray cluster that others started, and says clearly why it cannot.

Ray itself tries for two minutes when nobody answers, and tells a wrong token only in its own log. So its head is asked
first, by the call that `ray health-check` makes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import grpc
import ray
import ray._private.utils
from ray._private.grpc_utils import init_grpc_channel
from ray._private.services import canonicalize_bootstrap_address
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.job_config import JobConfig

from diptych.errors import ConfigError, StartError

# What Ray's table of jobs says of this program.
ENTRYPOINT = "diptych serve"
# Seconds for an answer of Ray's head.
HEAD_TIMEOUT_S = 6.0
TOKEN_FIX = "give the cluster's token: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or the file ~/.ray/auth_token"


def join_cluster(address: str, namespace: str) -> str:
    """Connect this process, the driver, to the cluster; returns the address of Ray's head.

    Raises:
        ConfigError: the address has not the form HOST:PORT.
        StartError: no Ray is there, it refuses the token, has another version, or this machine is no node of it.
    """
    head = find_head(address)
    check_head(head)
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
    return head


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
