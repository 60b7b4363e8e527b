"""Handles operators' orders to single workers. These routes exist only with an admin key; by default there is none.

POST /admin/workers/{name}/drain   {"force": false}
POST /admin/workers/{name}/turn    {"role": "prefill" | "decode", "force": false}: change the worker's role
POST /admin/replan                 for the replanner of `--replan`, see services/gateway/ops/replan_endpoint.py
"""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.shown_text import quote_text
from diptych.messages import Drain, SwitchRole
from router.workers.worker_state import WorkerState
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.http.error_response import JSON_TYPE
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.request_limits import MAX_ORDER_BYTES
from services.gateway.ops.replan_endpoint import ReplanRoute

MAX_BODY_DEPTH = 4


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a drain order. The last worker of a role is drained only with `force`."""

    force: bool = False


class SwitchRoleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of an order to change roles. The last worker of a role changes it only with `force`."""

    role: Literal["prefill", "decode"]
    force: bool = False


class OrderAccepted(msgspec.Struct, frozen=True):
    """The order that a worker was given. It is followed once the worker's requests have ended; see `/status`."""

    worker: str
    order: str
    role: str


class AdminRoutes:
    """The handlers of the `/admin` routes. They answer 202, because workers follow orders later.

    Raises RequestError: 404 for an unknown worker; 409 if it is the last of its role or cannot follow the order.
    """

    def __init__(self, backend: RelayBackend, replan_route: ReplanRoute | None = None) -> None:
        """`replan_route` handles `/admin/replan`; None without `--replan`."""
        self._backend, self.replan_route = backend, replan_route

    async def drain(self, request: Request) -> Response:
        """Order a worker to finish its requests and take no others.

        Raises:
            RequestError: 404, no such worker; 409, it is the last worker of its role.
        """
        async with request.state.body.limit_bytes(MAX_ORDER_BYTES) as body:
            order = parse_body(body or b"{}", DrainRequest, MAX_BODY_DEPTH)
        worker_state = self._find_worker(request)
        self._refuse_last_worker(worker_state, order.force)
        self._backend.send_order(worker_state.name, Drain())
        return _accepted_response(worker_state, "drain", worker_state.role)

    async def switch_role(self, request: Request) -> Response:
        """Order a worker to finish its requests and then change to the other role.

        Raises:
            RequestError: 404, no such worker; 409, it cannot change to this role now.
        """
        async with request.state.body.limit_bytes(MAX_ORDER_BYTES) as body:
            order = parse_body(body, SwitchRoleRequest, MAX_BODY_DEPTH)
        worker_state = self._find_worker(request)
        if not self._backend.relay.split:
            problem = "all workers here prefill and decode: there is no other role"
            raise RequestError(RequestFailure(FailureReason.NOT_SPLIT, problem))
        if worker_state.draining:
            problem = f"{worker_state.name} is draining already"
            raise RequestError(RequestFailure(FailureReason.WORKER_DRAINING, problem))
        if worker_state.role == order.role:
            problem = f"{worker_state.name} is a {worker_state.role} worker already"
            raise RequestError(RequestFailure(FailureReason.SAME_ROLE, problem))
        self._refuse_last_worker(worker_state, order.force)
        self._backend.send_order(worker_state.name, SwitchRole(order.role))
        return _accepted_response(worker_state, "turn", order.role)

    def _find_worker(self, request: Request) -> WorkerState:
        """The worker that the path names. Raises RequestError (404) if it is not up."""
        name = request.path_params["name"]
        worker_state = self._backend.relay.fleet.workers.get(name)
        if worker_state is None:
            problem = f"no worker {quote_text(name)} is up"
            raise RequestError(RequestFailure(FailureReason.WORKER_NOT_FOUND, problem, "name"))
        return worker_state

    def _refuse_last_worker(self, worker_state: WorkerState, force: bool) -> None:
        """Raise RequestError (409) if no other worker of the role would be left, unless `force` is set."""
        peers = self._backend.relay.fleet.workers_of(worker_state.role)
        if not force and not any(peer is not worker_state and not peer.draining for peer in peers):
            last = f"{worker_state.name} is the last {worker_state.role} worker"
            problem = f"{last}; send 'force': true to do it nevertheless"
            raise RequestError(RequestFailure(FailureReason.LAST_WORKER, problem))


def _accepted_response(worker_state: WorkerState, order: str, role: str) -> Response:
    """The response (202) to an order that was passed to the worker."""
    return Response(
        msgspec.json.encode(OrderAccepted(worker_state.name, order, role)), 202, media_type=JSON_TYPE
    )
