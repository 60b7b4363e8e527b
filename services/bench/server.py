"""What is known of a server before it is measured: its model, its route, and which fields it takes.

Any server with OpenAI's API does. Lengths of answers are forced by `ignore_eos` and `min_tokens` where the server takes
them, which one request tells; where it does not, answers end when the model ends them, and the report says how many
were short.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import msgspec

from diptych.errors import ConfigError, StartError
from services.bench.http_client import BenchClient, ServerAddress, refusal_reason
from services.bench.prompts import ANCHOR, CountTokens, Vocabulary, learn_vocabulary
from services.bench.sse import StreamedAnswer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROUTES = {"completions": (COMPLETIONS,), "chat": (CHAT,), "auto": (COMPLETIONS, CHAT)}
# Seconds to wait for the answers to the questions asked here.
PROBE_TIMEOUT_S = 60.0
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
ABSENT = ("404", "405")
REFUSED = ("400", "422")


@dataclass(frozen=True, slots=True)
class LengthFields:
    """The fields by which this server is asked for an answer's length: the name of the field, whether it takes
    `ignore_eos` and `min_tokens`, and whether it has to be asked for usage.
    """

    length: str
    ignore_eos: bool
    min_tokens: bool
    usage: bool

    def request_fields(self, tokens: int) -> dict[str, Any]:
        """The fields of a request whose answer is to have `tokens` tokens."""
        fields: dict[str, Any] = {self.length: tokens}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.min_tokens:
            fields["min_tokens"] = tokens
        if self.usage:
            fields["stream_options"] = {"include_usage": True}
        return fields


LENGTH_FIELDS = (  # best first
    LengthFields("max_tokens", True, True, True),
    LengthFields("max_tokens", True, False, True),
    LengthFields("max_tokens", False, False, True),
    LengthFields("max_completion_tokens", False, False, True),
    LengthFields("max_tokens", False, False, False),
)


@dataclass(frozen=True, slots=True)
class BenchServer:
    """A server that is ready to be measured."""

    client: BenchClient
    model: str
    route: str
    length_fields: LengthFields
    vocabulary: Vocabulary
    # Most tokens of prompt and answer together; None if the server does not say.
    max_model_len: int | None
    # The classes of KV that a request may choose from; empty if there is no choice.
    kv_classes: tuple[str, ...] = ()
    # The threshold of eviction that every request asks for; None: that of the server.
    keep: float | None = None

    def request_body(self, text: str, tokens: int, kv_class: str = "") -> bytes:
        """A request for an answer of `tokens`, in a class of KV where there is a choice; "": the server's default."""
        own: dict[str, Any] = {"kv": kv_class} if kv_class and self.kv_classes else {}
        if self.keep is not None:
            own["keep"] = self.keep
        more = {"diptych": own} if own else {}
        return _request_body(self.route, self.model, self.length_fields, text, tokens, more)

    async def send_smallest(self, tokens: int = 1) -> StreamedAnswer:
        """The smallest request there is, for an answer of this many tokens."""
        answer = StreamedAnswer()
        await self.client.post_stream(self.route, self.request_body(ANCHOR, tokens), PROBE_TIMEOUT_S, answer)
        return answer


def _request_body(
    route: str, model: str, fields: LengthFields, text: str, tokens: int, more: Mapping[str, Any] = NO_FIELDS
) -> bytes:
    asked: dict[str, Any] = (
        {"messages": [{"role": "user", "content": text}]} if route == CHAT else {"prompt": text}
    )
    asked |= {"model": model, "stream": True, "temperature": 0.0, **fields.request_fields(tokens), **more}
    return msgspec.json.encode(asked)


async def probe_server(url: str, key: str | None, model: str | None, endpoint: str) -> BenchServer:
    """Find out how to ask the server at `url`. `endpoint` is a key of `ROUTES`; without `model`, its first one.

    Raises:
        ConfigError: `url` is no address, or the server does not say what it serves.
        StartError: nobody answers there, or it refuses every way of asking.
    """
    address = ServerAddress.from_url(url)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        base_url=address.url,
        headers=headers,
        timeout=PROBE_TIMEOUT_S,
        trust_env=False,
        # As the load itself: what this machine trusts, or `SSL_CERT_FILE` names.
        verify=ssl.create_default_context() if address.tls else True,
    ) as http:
        models = await _list_models(http, address.url)
        name = model or next(iter(models), None)
        if name is None:
            why = "GET /v1/models is no list of them"
            raise ConfigError(f"{address.url} does not say which models it has", why, "give --model NAME")
        client = BenchClient(address, key)
        route, fields = await _find_length_fields(client, name, ROUTES[endpoint])
        card = models.get(name, ListedModel())
        plain = BenchServer(client, name, route, fields, Vocabulary(()), card.max_model_len, card.kv_classes)
        return replace(plain, vocabulary=await learn_vocabulary(await _token_counter(plain, http)))


class ListedModel(NamedTuple):
    """What a server says of a model: the tokens that it takes, and its classes of KV, if there are several."""

    max_model_len: int | None = None
    kv_classes: tuple[str, ...] = ()

    @classmethod
    def read(cls, card: Mapping[str, Any]) -> ListedModel:
        """Reads an entry of /v1/models."""
        classes = tuple(map(str, card.get("kv_classes") or ()))
        return cls(card.get("max_model_len"), classes if len(classes) > 1 else ())


async def _list_models(http: httpx.AsyncClient, url: str) -> dict[str, ListedModel]:
    """The models that are listed, with what the server says of each."""
    try:
        response = await http.get("/v1/models")
    except httpx.HTTPError as error:
        raise _unreachable_error(url, str(error) or type(error).__name__) from None
    if response.status_code in (401, 403):
        raise _refused_error(*refusal_reason(response.status_code, response.content))
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return {str(one["id"]): ListedModel.read(one) for one in response.json()["data"]}
    return {}


async def _find_length_fields(
    client: BenchClient, model: str, routes: tuple[str, ...]
) -> tuple[str, LengthFields]:
    """The first route and way of asking that the server answers."""
    answer = StreamedAnswer()
    for route in routes:
        for fields in LENGTH_FIELDS:
            answer = StreamedAnswer()
            await client.post_stream(
                route, _request_body(route, model, fields, ANCHOR, 2), PROBE_TIMEOUT_S, answer
            )
            if not answer.failed:
                return route, fields
            if not answer.failed.startswith(REFUSED):
                break
        if not answer.failed.startswith((*ABSENT, *REFUSED)):
            break
    if answer.failed in ("no connection", "timeout"):
        raise _unreachable_error(client.address.url, answer.error_text)
    raise _refused_error(answer.failed, answer.error_text)


async def _token_counter(server: BenchServer, http: httpx.AsyncClient) -> CountTokens:
    """How this server's tokens are counted: by its own route for that, or by asking for an answer of one token."""

    async def tokenize(text: str) -> int | None:
        asked = {"model": server.model} | (
            {"messages": [{"role": "user", "content": text}]} if server.route == CHAT else {"prompt": text}
        )
        try:
            document = (await http.post("/tokenize", json=asked)).json()
            return int(document["count"] if "count" in document else len(document["tokens"]))
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None

    async def usage(text: str) -> int | None:
        answer = StreamedAnswer()
        await server.client.post_stream(server.route, server.request_body(text, 1), PROBE_TIMEOUT_S, answer)
        return answer.usage.prompt_tokens if answer.usage is not None and not answer.failed else None

    return tokenize if await tokenize(ANCHOR) else usage


def _unreachable_error(url: str, why: str) -> StartError:
    return StartError(
        f"no server answers at {url}",
        why.splitlines()[0][:200] if why else "",
        "start one with `diptych serve`, or name another with --url",
    )


def _refused_error(kind: str, reason: str) -> StartError:
    fixes = {
        "401": "--api-key KEY, or DIPTYCH_API_KEY in the environment",
        "404": "--model and --endpoint name others",
    }
    why = " ".join(reason.split())[:300]
    return StartError(f"the server refuses to be measured: {kind}", why, fixes.get(kind[:3], ""))


async def wait_for_rest(server: BenchServer, calm_s: float, longest_s: float) -> bool:
    """Wait until a small request takes no more than twice `calm_s`, but not longer than `longest_s`.

    Returns whether it came to that: a run that begins on the queue of another measures that one.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + longest_s
    while loop.time() < until_s:
        begun_s = loop.time()
        answer = await server.send_smallest()
        if not answer.failed and loop.time() - begun_s <= 2 * calm_s:
            return True
        await asyncio.sleep(0.2)
    return False
