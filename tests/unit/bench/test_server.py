"""How a server is asked: what it takes is found out, not assumed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from diptych.errors import ConfigError, StartError
from services.bench.server import CHAT, COMPLETIONS, BenchServer, ListedModel, probe_server
from tests.unit.bench import fake_server
from tests.unit.bench.fake_server import Asked

Writer = asyncio.StreamWriter


def server(
    *routes: str, refuses: tuple[str, ...] = (), counts: bool = True, listed: Any = None
) -> Callable[[Asked, Writer], Awaitable[None]]:
    """One with these routes, which answers 400 to some fields."""

    async def answer(asked: Asked, writer: Writer) -> None:
        if asked.path == "/v1/models":
            models = [{"id": "m", "max_model_len": 512}] if listed is None else listed
            writer.write(fake_server.plain(200, {"data": models}))
        elif asked.path not in routes:
            writer.write(fake_server.refusal(404, "unknown_url"))
        elif unknown := [name for name in refuses if name in asked.body]:
            writer.write(fake_server.refusal(400, "unsupported_parameter", unknown[0]))
        else:
            said = asked.body.get("prompt") or asked.body["messages"][0]["content"]
            usage = (
                [fake_server.usage(2 + len(said.split()), 1)]
                if counts and "stream_options" in asked.body
                else []
            )
            writer.write(fake_server.whole(fake_server.text("a", "length"), *usage, fake_server.DONE))

    return answer


async def met(answer: Callable[[Asked, Writer], Awaitable[None]], **given: Any) -> BenchServer:
    async with fake_server.serving(answer) as running:
        target = await probe_server(running.url, None, given.get("model"), given.get("endpoint", "auto"))
        target.client.close_idle()
    return target


async def test_lengths_are_forced_where_the_server_takes_that() -> None:
    target = await met(server(COMPLETIONS, CHAT))
    assert (target.model, target.route, target.max_model_len) == ("m", COMPLETIONS, 512)
    assert target.length_fields.request_fields(9) == {
        "max_tokens": 9, "min_tokens": 9, "ignore_eos": True, "stream_options": {"include_usage": True}
    }  # fmt: skip
    assert target.vocabulary.checked and target.vocabulary.base == 3


@pytest.mark.parametrize(
    ("refuses", "fields"),
    [
        (("min_tokens",), {"max_tokens", "ignore_eos", "stream_options"}),
        (("ignore_eos",), {"max_tokens", "stream_options"}),
        (("ignore_eos", "max_tokens"), {"max_completion_tokens", "stream_options"}),
        (("ignore_eos", "stream_options"), {"max_tokens"}),
    ],
)
async def test_fields_that_are_refused_are_left_out(refuses: tuple[str, ...], fields: set[str]) -> None:
    target = await met(server(COMPLETIONS, refuses=refuses))
    assert set(target.length_fields.request_fields(9)) == fields
    assert target.vocabulary.checked == ("stream_options" in fields)


async def test_a_server_that_can_only_chat() -> None:
    target = await met(server(CHAT))
    assert target.route == CHAT and b'"messages"' in target.request_body("hello", 3)
    assert b"diptych" not in target.request_body("hello", 3, "tq4"), "this server has no classes of KV"
    choice = replace(target, kv_classes=("raw", "tq4"))
    assert b'"diptych":{"kv":"tq4"}' in choice.request_body("hello", 3, "tq4")
    assert b"diptych" not in choice.request_body("hello", 3)
    cards = [
        ListedModel.read({"id": "m", "kv_classes": classes}) for classes in ([], ["raw"], ["raw", "tq4"])
    ]
    assert [card.kv_classes for card in cards] == [(), (), ("raw", "tq4")]


async def test_a_model_by_name_needs_no_list() -> None:
    target = await met(server(COMPLETIONS, listed="none"), model="other")
    assert (target.model, target.max_model_len) == ("other", None)


async def test_tokens_are_counted_by_the_servers_own_route_where_it_has_one() -> None:
    inner = server(COMPLETIONS)

    async def answer(asked: Asked, writer: Writer) -> None:
        if asked.path == "/tokenize":
            writer.write(fake_server.plain(200, {"tokens": [0] * (9 + len(asked.body["prompt"].split()))}))
        else:
            await inner(asked, writer)

    assert (await met(answer)).vocabulary.base == 10


async def test_what_cannot_be_measured_says_so() -> None:
    with pytest.raises(ConfigError, match="does not say which models"):
        await met(server(COMPLETIONS, listed=[]))
    with pytest.raises(StartError, match="404 unknown_url"):
        await met(server())
    with pytest.raises(StartError, match="400 unsupported_parameter"):
        await met(server(COMPLETIONS, CHAT, refuses=("model",)))
    with pytest.raises(StartError, match="401 invalid_api_key") as caught:
        await met(refuse)
    assert "--api-key" in caught.value.fix


async def refuse(asked: Asked, writer: Writer) -> None:
    writer.write(fake_server.refusal(401, "invalid_api_key"))


async def test_nobody_there() -> None:
    async with fake_server.serving(server(COMPLETIONS)) as running:
        url = running.url
    with pytest.raises(StartError, match="no server answers at"):
        await probe_server(url, None, None, "auto")
