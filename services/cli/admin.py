"""`diptych drain` and `diptych turn`: what a person may ask of one worker of a running deployment."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx

from diptych.errors import ConfigError, StartError
from services.cli import talk

NO_KEY = "name the gateway's admin key: --admin-key KEY, or DIPTYCH_ADMIN_KEY in the environment"
FIXES = {
    401: NO_KEY,
    403: NO_KEY,
    404: "see the workers with `diptych status`; a gateway takes orders only when it was started with --admin-key",
}
LAST = "repeat it with --force if that is what you want"  # no other conflict is helped by it


def drain(url: str, key: str | None, worker: str, force: bool) -> int:
    """Let a worker end when what it holds is done. Returns the exit status.

    Raises:
        ConfigError: there is no key.
        StartError: nothing answers there, or it refuses.
    """
    _order(url, key, worker, "drain", {"force": force})
    print(f"{worker} drains: it takes no new requests, ends with those it has, and is not started again")
    return 0


def turn(url: str, key: str | None, worker: str, role: str, force: bool) -> int:
    """Let a worker change to the other pool. Returns the exit status. Raises like `drain`."""
    _order(url, key, worker, "turn", {"role": role, "force": force})
    print(f"{worker} turns: it ends its requests, then it is a {role} worker, with the same weights")
    return 0


def _order(url: str, key: str | None, worker: str, verb: str, body: dict[str, Any]) -> None:
    if not key:
        raise ConfigError(f"diptych {verb} needs a key", "it is an order, not a request", NO_KEY)
    try:
        with talk.client(url, key) as gateway:
            answer = gateway.post(f"/admin/workers/{quote(worker, safe='')}/{verb}", json=body)
    except httpx.HTTPError as error:
        raise talk.unreachable(url, error) from None
    if not answer.is_success:
        refused = talk.refused(answer)
        fix = LAST if _code(answer) == "last_worker" else FIXES.get(answer.status_code, refused.fix)
        raise StartError(refused.what, refused.why, fix)


def _code(answer: httpx.Response) -> str:
    """The code in OpenAI's error body; "" if it is none."""
    try:
        return str(answer.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""
