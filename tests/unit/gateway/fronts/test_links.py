"""A front and the relay's process over a real socket: what one asks the other does, and what either loses with it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
from starlette.types import Message, Receive, Scope, Send

from diptych.chunks import RAW_CLASS
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.messages import Logprob, Output
from diptych.request import Request, RequestStage, SamplingParams, Tenancy
from router.effects import (
    AttemptBegan,
    AttemptRetried,
    ChosenPair,
    KvMoved,
    OverdraftSettled,
    PrefilledLocally,
    RequestQuarantined,
    RequestQueued,
    StageDurations,
    StageEntered,
    TelemetryEffect,
)
from services.gateway.fronts import front_peer
from services.gateway.fronts.frame_link import new_address, open_unix_listener
from services.gateway.fronts.front_peer import FrontPeer, RelayedSink
from services.gateway.fronts.relay_admission import RelayAdmission
from services.gateway.fronts.relay_client import RELAY_LOST, RelayClient, RelayedErrors
from services.gateway.fronts.wire import Counts, Progressed, pack_requests, unpack_requests
from services.gateway.keys.key_watch import open_named_keys
from services.gateway.keys.named_keys import tenant_of_name
from services.gateway.keys.rated_backend import RatedBackend
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.tenancy import tenant_of_key
from services.gateway.openai.validate import RequestRules
from services.gateway.outcomes import Ending, RequestOutcomes, SequenceRecord
from services.gateway.preparation.preparer_pool import PreparerPool
from services.gateway.service import GatewayService
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.system.scripted_gateway import Script
from tests.unit.gateway.keys.named_file import Sink, write_keys
from tests.unit.gateway.outcome_watcher import Watcher

EFFECTS: list[TelemetryEffect] = [
    StageDurations("r", {"prefill": 1.0}),
    RequestQueued("r"),
    AttemptBegan("r", 1, ChosenPair(None, "d"), True),
    StageEntered("r", RequestStage.DECODING),
    KvMoved("r", "a", "b", "shm", 1, 0.5),
    AttemptRetried("r", "worker_lost", 2, why="it is gone"),
    PrefilledLocally("r", "sooner"),
    OverdraftSettled("r", True),
    RequestQuarantined("r"),
]
PLAIN, PATH = "p" * 20, "/v1/completions"
KEY = {"name": "team", "key": "k" * 20, "requests_per_minute": 2}
TEAM, ANYBODY = tenant_of_name("team"), tenant_of_key(PLAIN.encode())


@dataclass
class Pair:
    """Both ends. The relay's process plays a script; one named key has a rate."""

    script: Script
    service: GatewayService
    client: RelayClient
    watcher: Watcher
    peers: list[FrontPeer] = field(default_factory=list)
    gone: list[FrontPeer] = field(default_factory=list)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def add_peer(self, peer: FrontPeer) -> None:
        self.peers.append(peer)

    def remove_peer(self, peer: FrontPeer) -> None:
        self.gone.append(peer)


@pytest.fixture
async def pair(tokens: GatewayTokenizer, rules: RequestRules, tmp_path: Path) -> AsyncIterator[Pair]:
    script, watcher, lost = Script(tokens), Watcher(), asyncio.Event()
    write_keys(tmp_path / "keys.yaml", [KEY])
    watch = open_named_keys(str(tmp_path / "keys.yaml"), (PLAIN,))
    keys = watch.keys
    service = GatewayService(
        rules,
        RatedBackend(script, keys),
        GatewayMetrics(),
        PreparerPool(rules),
        lambda: "fp",
        outcomes=RequestOutcomes(None, [watcher]),
    )
    made = Pair(script, service, RelayClient("front-0", lost.set), watcher, lost=lost)
    address, loop = new_address("test"), asyncio.get_running_loop()
    server = await loop.create_unix_server(
        lambda: FrontPeer(service, watch, made).link, sock=open_unix_listener(address)
    )
    await made.client.connect(address)
    yield made
    made.client.close()
    await until(lambda: made.gone)
    server.close()
    service.close()


def sequence(name: str, prompt: Any, tenant: str = "", max_tokens: int = 8) -> Request:
    made = Request(name, prompt, SamplingParams(max_tokens=max_tokens, seed=1), 1e9, tenancy=Tenancy(tenant))
    made.entered_s[RequestStage.ADMITTED] = 1.0
    return made


def prompt_of(tokens: GatewayTokenizer, text: str) -> memoryview[int]:
    return memoryview(array("I", tokens.encode(text, special=False)).tobytes()).cast("I")


async def until(true: Any) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.005)


async def test_tokens_come_and_the_state_is_known_first(pair: Pair, tokens: GatewayTokenizer) -> None:
    assert pair.client.state.fingerprint == "fp" and [peer.name for peer in pair.peers] == ["front-0"]
    sinks = [Sink(), Sink()]
    prompt = prompt_of(tokens, "Hello")
    pair.client.submit_requests([(sequence(f"a.{i}", prompt), sink) for i, sink in enumerate(sinks)])
    await until(lambda: all(sink.finished for sink in sinks))
    assert [sink.finished for sink in sinks] == ["length", "length"]
    assert sum(len(output.tokens) for output in sinks[0].outputs) == 8
    seen = pair.script.seen
    assert [one.prompt.obj for one in seen] == [seen[0].prompt.obj] * 2  # type: ignore[attr-defined]
    assert not pair.peers[0].open


async def test_scores_of_a_prompt_that_do_not_fit_fail_their_sequence_alone(
    pair: Pair, tokens: GatewayTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = {name: Sink() for name in ("scored", "plain")}
    for name, sink in sinks.items():
        pair.client.submit_requests([(sequence(name, prompt_of(tokens, "HANG")), sink)])
    await until(lambda: len(pair.script.open) == 2)
    [peer] = pair.peers
    monkeypatch.setattr(front_peer, "MAX_WAITING_BYTES", -1)
    scores = [None, Logprob(1, -0.5, [])]
    RelayedSink(peer, "plain").deliver_output(Output("plain", 0, [1]), 1.0)
    RelayedSink(peer, "scored").deliver_output(Output("scored", 0, [1], prompt_logprobs=scores), 1.0)
    await until(lambda: sinks["scored"].failures and sinks["plain"].outputs)
    [failure] = sinks["scored"].failures
    assert failure.reason is FailureReason.ANSWER_MEMORY_FULL and not sinks["scored"].outputs
    assert list(pair.script.open) == ["plain"] == list(peer.open) and not pair.lost.is_set()


async def test_who_leaves_is_cancelled_and_who_dies_is_too(pair: Pair, tokens: GatewayTokenizer) -> None:
    record = SequenceRecord("toy", 1, arrived_s=1.0)
    pair.client.on_arrived(record, 1.0)
    prompt = prompt_of(tokens, "HANG")
    for name in ("left", "held"):
        pair.client.submit_requests([(sequence(name, prompt), Sink())])
    await until(lambda: len(pair.script.open) == 2)
    pair.client.cancel_request("left", "unknown")
    await until(lambda: list(pair.script.open) == ["held"])
    pair.client.close()
    await until(lambda: pair.gone)
    assert not pair.script.open
    assert pair.watcher.arrived == [record]
    [ended] = pair.watcher.ended
    assert ended.ending is Ending.FAILED and ended.failure is not None
    assert ended.failure.reason is FailureReason.INTERNAL_ERROR


async def test_a_relay_that_ends_fails_all_that_is_open(pair: Pair, tokens: GatewayTokenizer) -> None:
    sink = Sink()
    pair.client.submit_requests([(sequence("a", prompt_of(tokens, "HANG")), sink)])
    await until(lambda: pair.script.open)
    pair.peers[0].link.close()
    await pair.lost.wait()
    assert sink.failures == [RELAY_LOST]
    later = Sink()
    pair.client.submit_requests([(sequence("b", prompt_of(tokens, "x")), later)])
    assert later.failures == [RELAY_LOST]
    assert (await pair.client.ask_admission("", True)).refusal == RELAY_LOST
    assert pair.client.find_refusal(1, "") == RELAY_LOST


async def test_admission_and_rates_are_decided_by_the_relay(pair: Pair, tokens: GatewayTokenizer) -> None:
    full = RequestFailure(FailureReason.QUEUE_FULL, "full")
    assert await ask(pair, ANYBODY) == (204, [])
    pair.script.refuses = full
    assert (await ask(pair, ANYBODY))[0] == 429
    await until(lambda: pair.watcher.ended)
    assert [one.failure for one in pair.watcher.ended] == [full]
    pair.script.refuses = None
    for left in (1, 0):
        pair.client.submit_requests([(sequence(f"r{left}", prompt_of(tokens, "x"), TEAM), Sink())])
        status, headers = await ask(pair, TEAM)
        assert (b"x-ratelimit-remaining-requests", str(left).encode()) in headers
        assert status == (204 if left else 429)


async def test_a_key_that_only_the_front_knows_yet_is_rated(pair: Pair, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.yaml", [KEY, {**KEY, "name": "new", "key": "n" * 20}])
    status, headers = await ask(pair, tenant_of_name("new"))
    assert status == 204 and (b"x-ratelimit-limit-requests", b"2") in headers


async def test_a_key_that_has_left_the_file_is_refused_though_a_front_still_knows_it(
    pair: Pair, tmp_path: Path
) -> None:
    write_keys(tmp_path / "keys.yaml", [{**KEY, "name": "new", "key": "n" * 20}])
    for tenant, status in ((TEAM, 204), (tenant_of_name("new"), 204), (TEAM, 401), (ANYBODY, 204)):
        assert (await ask(pair, tenant))[0] == status


async def test_a_front_that_leaves_tells_what_it_has_counted(pair: Pair) -> None:
    pair.client.count = lambda number: Counts(number, 3, {})
    await pair.client.leave()
    await until(lambda: pair.gone)
    assert pair.gone[0].counts.num_open == 3


async def ask(pair: Pair, tenant: str) -> tuple[int, list[tuple[bytes, bytes]]]:
    """The status and the rate headers of an answer behind the middleware."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    outcomes = RequestOutcomes(None, [pair.client])
    scope = {"type": "http", "path": PATH, "state": {"tenant": tenant}}
    await RelayAdmission(app, pair.client, outcomes, [PATH])(scope, None, send)  # type: ignore[arg-type]
    start = sent[0]
    return start["status"], [pair for pair in start["headers"] if pair[0].startswith(b"x-ratelimit")]


async def test_errors_and_counts_reach_the_relay(pair: Pair) -> None:
    failure = RequestFailure(FailureReason.MODEL_NOT_FOUND, "no")
    RelayedErrors(pair.client).add_error(0.0, failure, "req_1", PATH, "cmpl-1")
    [peer] = pair.peers
    await peer.ask_counts(30.0)
    assert peer.counts.number == 1
    [shown] = pair.service.errors.report(0.0)
    assert (shown["request_id"], shown["code"], shown["route"]) == ("req_1", "model_not_found", PATH)


def test_every_effect_and_field_of_a_request_survives() -> None:
    assert {type(effect) for effect in EFFECTS} == set(get_args(TelemetryEffect))
    for effect in EFFECTS:
        assert Progressed.of(effect, 1.0).read() == effect
    request = sequence("r", array("I", [1, 2, 3]))
    request.kv_class, request.chunks = RAW_CLASS, (b"a", b"b")
    [found] = unpack_requests(pack_requests([request]))
    assert list(found.prompt) == [1, 2, 3]
    for name in ("id", "sampling", "deadline_s", "tenancy", "kv_class", "default_class", "keep", "chunks"):
        assert getattr(found, name) == getattr(request, name)
    assert found.entered_s == request.entered_s
