"""What the driver hears from a worker's actor: its statuses, its death, and the keys that it wants. Ray is made up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from diptych.errors import ConfigError
from services.cluster.joined_cluster import NodeWorkerHandle
from services.cluster.node_worker import ActorReport
from services.cluster.sealed_keys import open_keys
from services.cluster.spec import SUPERVISOR_DIED
from services.host.supervision.supervisor import ChildStatus


class Actor:
    """An actor whose calls end with these results, one after the other.

    It opens keys with `private`, which is another key pair in each of its lives.
    """

    def __init__(self, *results: ActorReport | Exception, private: X25519PrivateKey | None = None) -> None:
        self._results: Iterator[ActorReport | Exception] = iter(results)
        self._private, self.keys = private, dict[str, bytes]()
        self.wait_status = SimpleNamespace(remote=self._answer)
        self.deliver_keys = SimpleNamespace(remote=self._open)
        self.stop = SimpleNamespace()

    async def _answer(self, version: int, timeout_s: float) -> ActorReport:
        result = next(self._results)
        if isinstance(result, Exception):
            raise result
        return result

    async def _open(self, sealed: bytes) -> None:
        assert self._private is not None
        try:
            self.keys = open_keys(sealed, self._private, "n/decode-0")
        except ConfigError as error:
            raise ray.exceptions.RayTaskError(  # type: ignore[no-untyped-call]
                "deliver_keys", str(error), error, ip="10.0.0.2"
            ) from None


def wanting_keys(private: X25519PrivateKey) -> ActorReport:
    """The report of an actor with this key pair."""
    return ActorReport(
        7, ChildStatus("decode-0"), "10.0.0.2", "/log", private.public_key().public_bytes_raw()
    )


def test_an_actor_that_dies_before_its_keys_come_is_waited_for() -> None:
    """Ray hands them to the actor that it has started in its place, which cannot open them."""
    first, second = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    actor = Actor(wanting_keys(first), wanting_keys(second), private=second)
    handle = NodeWorkerHandle("decode-0", actor, {"worker.public": b"k"}, "n/decode-0")

    async def story() -> list[ChildStatus | None]:
        return [await handle.next_status() for _ in range(2)]

    lost, starting = asyncio.run(story())
    assert lost is not None and (lost.state, lost.ended) == ("waiting", SUPERVISOR_DIED)
    assert starting is not None and (starting.state, starting.restarts) == ("starting", 1)
    assert actor.keys == {"worker.public": b"k"}


def test_an_actor_that_cannot_open_its_own_keys_has_failed() -> None:
    own, strange = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    actor = Actor(wanting_keys(own), wanting_keys(own), wanting_keys(own), private=strange)
    handle = NodeWorkerHandle("decode-0", actor, {"worker.public": b"k"}, "n/decode-0")

    async def story() -> list[ChildStatus | None]:
        return [await handle.next_status() for _ in range(3)]

    lost, failed, third = asyncio.run(story())
    assert lost is not None and lost.state == "waiting" and third is None
    assert failed is not None and failed.state == "failed" and failed.error is not None
    assert "cannot be opened" in failed.error.why


def test_a_failed_actor_is_reported_once_and_a_dead_one_waits_for_ray() -> None:
    gone = ray.exceptions.RayActorError(error_msg="it is gone")
    unmade = ray.exceptions.RayActorError(error_msg="first line\nno module named x", actor_init_failed=True)
    broken = ray.exceptions.RayError("it cannot be asked")
    back = ActorReport(7, ChildStatus("decode-0", "ready", version=1), "10.0.0.3", "/log", b"")
    handle = NodeWorkerHandle("decode-0", Actor(unmade, unmade, broken, gone, gone, back), {}, "n/decode-0")

    async def story() -> list[ChildStatus | None]:
        return [await handle.next_status() for _ in range(6)]

    failed, second, third, lost, fifth, ready = asyncio.run(story())
    assert failed is not None and failed.state == "failed" and failed.error is not None
    assert failed.error.why == "no module named x"
    assert second is None and third is None and fifth is None
    assert lost is not None and lost.state == "waiting"
    assert ready is not None and (ready.state, ready.restarts) == ("ready", 1)
    assert handle.address == "10.0.0.3"


def test_a_worker_is_killed_by_its_actor_where_rays_head_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    graces = list[float]()

    def wait_in_vain(actor: Actor) -> None:
        assert graces == [0.0], "it is asked before"
        raise ray.exceptions.RayError("the head is gone")

    monkeypatch.setattr(ray, "kill", wait_in_vain)
    actor = Actor()
    actor.stop = SimpleNamespace(remote=graces.append)
    with pytest.raises(ray.exceptions.RayError, match="the head is gone"):
        NodeWorkerHandle("decode-0", actor, {}, "n/decode-0").kill()
