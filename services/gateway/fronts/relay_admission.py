"""Asks the relay's process whether a request may come, before its body is read: rates and queues are counted there."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.fronts.relay_client import RelayClient
from services.gateway.http.error_response import error_response
from services.gateway.outcomes import Ending, RequestOutcomes


class RelayAdmission:
    """ASGI middleware of a front, in the place of `RateMiddleware`. Requests for `paths` have sequences."""

    def __init__(
        self, app: ASGIApp, client: RelayClient, outcomes: RequestOutcomes, paths: Collection[str]
    ) -> None:
        self.app, self._client, self._outcomes = app, client, outcomes
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        tenant, rated = scope["state"]["tenant"], scope["path"] in self._paths
        admission = await self._client.ask_admission(tenant, rated)

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = admission.headers or (await self._client.ask_rates(tenant)).headers
                message = {**message, "headers": [*message.get("headers", []), *headers]}
            await send(message)

        send_answer = send_with_rates if admission.is_limited else send
        if admission.refusal is None:
            return await self.app(scope, receive, send_answer)
        if rated:
            self._outcomes.end_sequence(None, Ending.FAILED, admission.refusal)
        await error_response(admission.refusal)(scope, receive, send_answer)
