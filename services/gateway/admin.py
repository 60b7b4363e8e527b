"""Orders to single workers: drain, and change pools. There only for who has the admin key, and none is set by default.

POST /admin/workers/{name}/drain   {"force": false}
POST /admin/workers/{name}/turn    {"role": "prefill" | "decode", "force": false}
POST /admin/replan                 with `--replan`, for the replanner: services/gateway/replan.py
"""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diptych.errors import RequestError
from diptych.messages import Drain, Turn
from router.fleet import Member
from services.gateway.backend import RelayBackend
from services.gateway.errors import JSON
from services.gateway.parse import parse
from services.gateway.replan import Replanning

MAX_DEPTH = 4


class DrainOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`force` also takes the last worker of its role."""

    force: bool = False


class TurnOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`role` is the pool to change to."""

    role: Literal["prefill", "decode"]
    force: bool = False


class Ordered(msgspec.Struct, frozen=True):
    """What a worker is to do. It does so when what it holds is done; `/status` shows how far it is."""

    worker: str
    order: str
    role: str


class Admin:
    """One method per route. Each answers 202, since the worker is told, and does so, in its own time.

    Raises RequestError: 404, no such worker; 409, it is the last of its role, or cannot do so.
    """

    def __init__(self, backend: RelayBackend, replanning: Replanning | None = None) -> None:
        """`replanning` is there if a replanner is."""
        self._backend, self.replanning = backend, replanning

    async def drain(self, request: Request) -> Response:
        order = parse(await request.body() or b"{}", DrainOrder, MAX_DEPTH)
        member = self._member(request)
        self._spare_last(member, order.force)
        self._backend.command(member.name, Drain())
        return _ordered(member, "drain", member.role)

    async def turn(self, request: Request) -> Response:
        order = parse(await request.body(), TurnOrder, MAX_DEPTH)
        member = self._member(request)
        if not self._backend.relay.split:
            raise _conflict("not_split", "workers of this deployment do both: there is no other pool")
        if member.draining:
            raise _conflict("worker_draining", f"{member.name} is draining already")
        if member.role == order.role:
            raise _conflict("same_role", f"{member.name} is a {member.role} worker already")
        self._spare_last(member, order.force)
        self._backend.command(member.name, Turn(order.role))
        return _ordered(member, "turn", order.role)

    def _member(self, request: Request) -> Member:
        name = request.path_params["name"]
        member = self._backend.relay.fleet.members.get(name)
        if member is None:
            told = f"no worker '{name[:100]}' is up"
            raise RequestError(told, status=404, code="worker_not_found", param="name")
        return member

    def _spare_last(self, member: Member, force: bool) -> None:
        peers = self._backend.relay.fleet.role(member.role)
        if not force and not any(peer is not member and not peer.draining for peer in peers):
            told = (
                f"{member.name} is the last {member.role} worker; send 'force': true if that is what you want"
            )
            raise _conflict("last_worker", told)


def _conflict(code: str, told: str) -> RequestError:
    return RequestError(told, status=409, code=code)


def _ordered(member: Member, order: str, role: str) -> Response:
    return Response(msgspec.json.encode(Ordered(member.name, order, role)), 202, media_type=JSON)
