"""`diptych drain` and `diptych switch-role`: orders to one worker of a running deployment."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx

from diptych.errors import ConfigError, StartError
from services.cli.client.chat import http_client
from services.cli.client.gateway_http import refused_error, unreachable_error

NO_KEY_FIX = "name the gateway's admin key: --admin-key KEY, or DIPTYCH_ADMIN_KEY in the environment"
FIXES = {
    401: NO_KEY_FIX,
    403: NO_KEY_FIX,
    404: "see the workers with `diptych status`; a gateway takes orders only when it was started with --admin-key",
}
# Only this conflict is resolved by --force.
FORCE_FIX = "repeat it with --force if that is what you want"


def drain_worker(url: str, key: str | None, worker: str, force: bool) -> int:
    """Order a worker to finish its requests and end. Returns the exit status.

    Raises:
        ConfigError: there is no key.
        StartError: nothing answers there, or it refuses.
    """
    _post_order("drain", url, key, f"{quote(worker, safe='')}/drain", {"force": force})
    print(f"{worker} drains: it takes no new requests, ends with those it has, and is not started again")
    return 0


def switch_role(url: str, key: str | None, worker: str, role: str, force: bool) -> int:
    """Order a worker to change to the other pool. Returns the exit status. Raises like `drain_worker`."""
    order = {"role": role, "force": force}
    _post_order("switch-role", url, key, f"{quote(worker, safe='')}/turn", order)
    print(f"{worker} switches roles: it ends its requests, then it is a {role} worker, with the same weights")
    return 0


def _post_order(command: str, url: str, key: str | None, route: str, body: dict[str, Any]) -> None:
    if not key:
        raise ConfigError(f"diptych {command} needs a key", "it is an order, not a request", NO_KEY_FIX)
    try:
        with http_client(url, key) as gateway:
            answer = gateway.post(f"/admin/workers/{route}", json=body)
    except httpx.HTTPError as error:
        raise unreachable_error(url, error) from None
    if not answer.is_success:
        refusal = refused_error(answer.status_code, answer.content)
        fix = (
            FORCE_FIX if _error_code(answer) == "last_worker" else FIXES.get(answer.status_code, refusal.fix)
        )
        raise StartError(refusal.what, refusal.why, fix)


def _error_code(answer: httpx.Response) -> str:
    """The code in OpenAI's error body; "" if it is none."""
    try:
        return str(answer.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""
