"""What is known of a server before it is measured: its model, its route, and which fields it takes.

Any server with OpenAI's API does. Lengths of answers are forced by `ignore_eos` and `min_tokens` where the server takes
them, which one request tells; where it does not, answers end when the model ends them, and the report says how many
were short.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec

from diptych.errors import ConfigError, StartError
from services.bench.client import Client, Origin, refusal
from services.bench.events import Answer
from services.bench.prompts import ANCHOR, Count, Vocabulary, learn

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROUTES = {"completions": (COMPLETIONS,), "chat": (CHAT,), "auto": (COMPLETIONS, CHAT)}
PATIENCE_S = 60.0  # for the answers to the questions asked here
ABSENT = ("404", "405")
REFUSED = ("400", "422")


@dataclass(frozen=True, slots=True)
class Way:
    """How this server is asked for a length: the field's name, whether it takes `ignore_eos` and `min_tokens`, and
    whether it is asked for its usage.
    """

    length: str
    ignore_eos: bool
    min_tokens: bool
    usage: bool

    def fields(self, tokens: int) -> dict[str, Any]:
        told: dict[str, Any] = {self.length: tokens}
        if self.ignore_eos:
            told["ignore_eos"] = True
        if self.min_tokens:
            told["min_tokens"] = tokens
        if self.usage:
            told["stream_options"] = {"include_usage": True}
        return told


WAYS = (  # best first
    Way("max_tokens", True, True, True),
    Way("max_tokens", True, False, True),
    Way("max_tokens", False, False, True),
    Way("max_completion_tokens", False, False, True),
    Way("max_tokens", False, False, False),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A server that is ready to be measured."""

    client: Client
    model: str
    route: str
    way: Way
    vocabulary: Vocabulary
    context_tokens: int | None  # of prompt and answer together, if the server says

    def body(self, text: str, tokens: int) -> bytes:
        """A request for an answer of `tokens`."""
        return _body(self.route, self.model, self.way, text, tokens)

    async def touch(self, tokens: int = 1) -> Answer:
        """The smallest request there is, for an answer of so many tokens."""
        answer = Answer()
        await self.client.ask(self.route, self.body(ANCHOR, tokens), PATIENCE_S, answer)
        return answer


def _body(route: str, model: str, way: Way, text: str, tokens: int) -> bytes:
    asked: dict[str, Any] = (
        {"messages": [{"role": "user", "content": text}]} if route == CHAT else {"prompt": text}
    )
    asked |= {"model": model, "stream": True, "temperature": 0.0, **way.fields(tokens)}
    return msgspec.json.encode(asked)


async def meet(url: str, key: str | None, model: str | None, endpoint: str) -> Target:
    """Find out how to ask the server at `url`. `endpoint` is a key of `ROUTES`; without `model`, its first one.

    Raises:
        ConfigError: `url` is no address, or the server does not say what it serves.
        StartError: nobody answers there, or it refuses every way of asking.
    """
    origin = Origin.of(url)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        base_url=origin.url, headers=headers, timeout=PATIENCE_S, trust_env=False
    ) as http:
        models = await _models(http, origin.url)
        name = model or next(iter(models), None)
        if name is None:
            why = "GET /v1/models is no list of them"
            raise ConfigError(f"{origin.url} does not say which models it has", why, "give --model NAME")
        client = Client(origin, key)
        route, way = await _way(client, name, ROUTES[endpoint])
        plain = Target(client, name, route, way, Vocabulary(()), models.get(name))
        return replace(plain, vocabulary=await learn(await _count(plain, http)))


async def _models(http: httpx.AsyncClient, url: str) -> dict[str, int | None]:
    """The models that are listed, with the tokens that each takes, where the server says so."""
    try:
        told = await http.get("/v1/models")
    except httpx.HTTPError as error:
        raise _nobody(url, str(error) or type(error).__name__) from None
    if told.status_code in (401, 403):
        raise _refused(*refusal(told.status_code, told.content))
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return {str(one["id"]): one.get("max_model_len") for one in told.json()["data"]}
    return {}


async def _way(client: Client, model: str, routes: tuple[str, ...]) -> tuple[str, Way]:
    """The first route and way of asking that the server answers."""
    answer = Answer()
    for route in routes:
        for way in WAYS:
            answer = Answer()
            await client.ask(route, _body(route, model, way, ANCHOR, 2), PATIENCE_S, answer)
            if not answer.failed:
                return route, way
            if not answer.failed.startswith(REFUSED):
                break
        if not answer.failed.startswith((*ABSENT, *REFUSED)):
            break
    if answer.failed in ("no connection", "timeout"):
        raise _nobody(client.origin.url, answer.told)
    raise _refused(answer.failed, answer.told)


async def _count(target: Target, http: httpx.AsyncClient) -> Count:
    """How this server's tokens are counted: by its own route for that, or by asking for an answer of one token."""

    async def tokenize(text: str) -> int | None:
        asked = {"model": target.model} | (
            {"messages": [{"role": "user", "content": text}]} if target.route == CHAT else {"prompt": text}
        )
        try:
            told = (await http.post("/tokenize", json=asked)).json()
            return int(told["count"] if "count" in told else len(told["tokens"]))
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None

    async def usage(text: str) -> int | None:
        answer = Answer()
        await target.client.ask(target.route, target.body(text, 1), PATIENCE_S, answer)
        return answer.usage.prompt_tokens if answer.usage is not None and not answer.failed else None

    return tokenize if await tokenize(ANCHOR) else usage


def _nobody(url: str, why: str) -> StartError:
    return StartError(
        f"no server answers at {url}",
        why.splitlines()[0][:200] if why else "",
        "start one with `diptych serve`, or name another with --url",
    )


def _refused(kind: str, told: str) -> StartError:
    fixes = {
        "401": "--api-key KEY, or DIPTYCH_API_KEY in the environment",
        "404": "--model and --endpoint name others",
    }
    why = " ".join(told.split())[:300]
    return StartError(f"the server refuses to be measured: {kind}", why, fixes.get(kind[:3], ""))


async def rest(target: Target, calm_s: float, longest_s: float) -> bool:
    """Wait until a small request takes no more than twice `calm_s`, but not longer than `longest_s`.

    Returns whether it came to that: a run that begins on the queue of another measures that one.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + longest_s
    while loop.time() < until_s:
        begun_s = loop.time()
        answer = await target.touch()
        if not answer.failed and loop.time() - begun_s <= 2 * calm_s:
            return True
        await asyncio.sleep(0.2)
    return False
