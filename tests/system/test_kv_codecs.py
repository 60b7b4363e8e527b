"""A deployment whose KV is coded: predicted room and moved bytes are what it shows, and answers tell the class."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest

from planner.costs.kv.codec import code_profile
from planner.costs.profile import CostProfile
from planner.costs.profile_file import built_in_profile
from planner.sim.exact.deployment import build_deployment
from planner.sim.exact.links import SimLinks
from planner.sim.exact.simulate import simulate_exact
from planner.types import DECODE, PREFILL, InstancePool, Job, LinkSpec, Parallelism, Placement
from tests.support.deployment import Served, serve_parts

pytestmark = pytest.mark.timeout(600)

POOL_BYTES = 8 << 20
# Bits of one number of KV in the embedded model, with its share of scales.
BITS = {"tq4": 4.5, "int8": 9.0}
# 6 layers of 4 heads of 32 values, keys and values, of 4 bytes.
RAW_TOKEN_BYTES = 6 * 4 * 32 * 2 * 4
LENGTHS = (5, 64, 65, 130, 300, 511)
NEW_TOKENS = 3
CLOSE = 0.05


@dataclass(frozen=True, slots=True)
class Coded:
    """A running deployment, and the codec of its KV as the user named it."""

    served: Served
    codec: str

    def kv_class(self) -> str:
        """The class that all workers name."""
        found = {name for one in self.served.status()["workers"] for name in one["kv_classes"]}
        (kv_class,) = found
        return str(kv_class)

    def ask(self, prompt: list[int], **extra: Any) -> Any:
        """The answer to a prompt of token ids, with its headers."""
        with self.served.client() as client:
            return client.completions.with_raw_response.create(
                model="tiny", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, **extra
            )


@pytest.fixture(scope="module", params=sorted(BITS))
def coded(request: pytest.FixtureRequest) -> Iterator[Coded]:
    codec = str(request.param)
    flags = ("--prefill", "1", "--decode", "1", "--transports", "shm", "--no-enable-prefix-caching")
    pool = ("--kv-cache-memory-bytes", str(POOL_BYTES), "--kv-cache-codec", codec)
    with serve_parts(*flags, *pool) as served:
        yield Coded(served, codec)


def predicted_profile(codec: str) -> CostProfile:
    """What is planned with: a profile of workers with such a pool and raw KV, for KV in `codec`."""
    raw = built_in_profile("embedded", "cpu")
    assert raw.model.kv_token_bytes == RAW_TOKEN_BYTES
    return code_profile(replace(raw, rooms={Parallelism(): POOL_BYTES // RAW_TOKEN_BYTES}), codec)


def predicted_bytes(profile: CostProfile, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> float:
    """The bytes of KV that the exact simulator moves for prompts of these lengths."""
    links: list[SimLinks] = []
    begin = SimLinks.__init__

    def note(self: SimLinks, *arguments: Any) -> None:
        begin(self, *arguments)
        links.append(self)

    monkeypatch.setattr(SimLinks, "__init__", note)
    pools = (InstancePool(PREFILL, Parallelism(), 1, "cpu"), InstancePool(DECODE, Parallelism(), 1, "cpu"))
    deployment = build_deployment(Placement(pools), profile, link=LinkSpec(1e9, 1e-4))
    served = simulate_exact(deployment, [Job(float(at_s), n, NEW_TOKENS) for at_s, n in enumerate(lengths)])
    assert len(served) == len(lengths) and not any(one.failed for one in served)
    return sum(link.moved for link in links)


def test_predicted_room_is_the_room_there_is(coded: Coded) -> None:
    predicted = predicted_profile(coded.codec).kv_tokens(Parallelism())
    for worker in coded.served.status()["workers"]:
        assert 64 * worker["stats"]["slabs_total"] == pytest.approx(predicted, rel=CLOSE)
    assert predicted == pytest.approx(POOL_BYTES / (RAW_TOKEN_BYTES * BITS[coded.codec] / 32), rel=1e-3)


def test_predicted_bytes_are_those_that_move(coded: Coded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canaries move one chunk each, and are counted too."""
    rng, (bytes_before, before) = random.Random(1), coded.served.moved_bytes()
    for length in LENGTHS:
        coded.ask([rng.randrange(100, 1000) for _ in range(length)], extra_body={"ignore_eos": True})
    bytes_after, after = coded.served.moved_bytes()
    canaries = after - before - len(LENGTHS)
    measured = bytes_after - bytes_before - canaries * 64 * RAW_TOKEN_BYTES * BITS[coded.codec] / 32
    predicted = predicted_bytes(predicted_profile(coded.codec), LENGTHS, monkeypatch)
    print(f"{coded.codec}: predicted {predicted:.0f} bytes, measured {measured:.0f}, {canaries:.0f} canaries")
    assert measured == pytest.approx(predicted, rel=CLOSE)


def test_answers_tell_the_class_and_what_it_saves(coded: Coded) -> None:
    answer, kv_class = coded.ask([300, 301, 302]), coded.kv_class()
    assert kv_class.startswith(coded.codec) and answer.headers["x-diptych-kv-class"] == kv_class
    body = answer.parse()
    assert body.system_fingerprint.endswith(f".{kv_class}")
    token_bytes = round(RAW_TOKEN_BYTES * BITS[coded.codec] / 32)
    assert body.usage.model_dump()["diptych"] == {
        "kv_class": kv_class,
        "kv_bytes_per_token": token_bytes,
        "kv_bytes_saved_per_token": RAW_TOKEN_BYTES - token_bytes,
        "kv_reason": "default",
    }
    with coded.served.client() as client:
        card = client.models.retrieve("tiny").model_dump()
    assert card["kv_classes"] == [kv_class]


def test_a_request_may_insist_on_the_class(coded: Coded) -> None:
    assert coded.ask([300, 301], extra_body={"diptych": {"kv": coded.codec}}).status_code == 200
    with pytest.raises(openai.BadRequestError) as caught:
        coded.ask([300, 301], extra_body={"diptych": {"kv": "raw"}})
    assert caught.value.param == "diptych.kv" and coded.kv_class() in str(caught.value)
