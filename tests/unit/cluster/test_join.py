"""What Ray's head says to a program that has no token, and what it learns of one. The head is made up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import ray
import ray._private.utils
from ray.core.generated import gcs_service_pb2

from services.cluster.join import head_is_open, join_cluster


class Head(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every call, or with `token` only those that have one."""

    def __init__(self, token: bool) -> None:
        self.token = token

    def service(self, details: Any) -> Any:
        named = {name for name, _ in details.invocation_metadata}

        def answer(asked: bytes, context: Any) -> bytes:
            if self.token and "authorization" not in named:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
            reply: Any = gcs_service_pb2
            return bytes(reply.CheckAliveReply(ray_version="2").SerializeToString())

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def running_head(token: bool) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Head(token)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("token", [True, False])
def test_a_head_without_token_is_found_open(token: bool) -> None:
    with running_head(token) as address:
        assert head_is_open(address) is not token
    assert not head_is_open(address, 0.2), "nobody is there any more"


def test_ray_does_not_learn_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have --api-key, and Ray shows it to whoever asks for the cluster's jobs."""
    seen = list[str]()
    parts: Any = ray._private.utils
    monkeypatch.setattr(ray, "init", lambda **_: seen.append(parts.get_entrypoint_name()))
    before = parts.get_entrypoint_name
    join_cluster("10.0.0.1:6379", "n")
    assert seen == ["diptych serve"] and parts.get_entrypoint_name is before
