"""Deployments whose KV is coded give the tokens of one worker alone, whether it moves, is shared or is computed again.

One worker alone is the engine's model runner in this process: it prefills a prompt at once and decodes token by token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.types import Completion
from transformers import AutoTokenizer

from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.step_work import StepWork
from kvcache.pool import KvPool
from planner.costs.kv.classes import plan_kv_classes
from planner.costs.profile_file import built_in_profile
from planner.sim.exact.deployment import SimDeployment, build_deployment
from planner.sim.exact.simulate import class_slabs, simulate_exact
from planner.types import DECODE, PREFILL, InstancePool, Job, Parallelism, Placement
from tests.support.deployment import Served, call_at_once, serve_parts, wait_for
from tests.system.factored_calibration import write_factored
from tests.system.transformers_oracle import TINY, read_text

pytestmark = pytest.mark.timeout(600)

NEW_TOKENS, CONTEXT = 10, 1024
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 200, 320, 448)
CALIBRATED, ROTATED, ROUNDED = "nuq4-1%", "tq4", "int8"
# Largest difference of a log-probability.
SAME = 2e-3
# Two ranks add in another order in every layer, which moves a number over the edge of a code now and then. It is then a
# whole step away, and so is what follows from it (docs/codecs.md): most log-probabilities are the same, few are not.
MOST, FAR = 0.9, 0.2


@dataclass(frozen=True, slots=True)
class Answer:
    """New tokens as strings, and their log-probabilities."""

    tokens: list[str]
    logprobs: list[float]


class LoneWorker:
    """The model over a pool with a codec, in this process, one sequence at a time."""

    def __init__(self, codec: str, file: str = "") -> None:
        files = Checkpoint.resolve(str(TINY))
        codec_id, calibration = resolve_kv_codec(files, codec, file, must_use=False)
        self.layout = files.layout(codec=codec_id)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
        pool = KvPool(self.layout, self.layout.num_chunks(CONTEXT))
        self._runner = CpuModelRunner.load(files, pool, CONTEXT, calibration)

    def answer(self, prompt: list[int], num_tokens: int = NEW_TOKENS) -> Answer:
        """Greedily `num_tokens` tokens after `prompt`."""
        slabs = list(range(self.layout.num_chunks(len(prompt) + num_tokens)))
        (logits,) = self._runner.run([StepWork(prompt, 0, slabs, "last", prompt[0])])
        answer = Answer([], [])
        for place in range(num_tokens):
            scores = torch.log_softmax(logits[0], dim=0)
            token = int(scores.argmax())
            answer.tokens.append(self._tokenizer.decode([token]))
            answer.logprobs.append(float(scores[token]))
            if place + 1 < num_tokens:
                work = StepWork([token], len(prompt) + place, slabs, "last", prompt[0])
                (logits,) = self._runner.run([work])
        return answer


@cache
def lone_worker(codec: str, file: str = "") -> LoneWorker:
    return LoneWorker(codec, file)


@cache
def expected(codec: str, number: int, file: str = "") -> Answer:
    return lone_worker(codec, file).answer(prompts()[number])


@cache
def prompts() -> list[list[int]]:
    """Real text, each prompt cut from another place."""
    text, rng = read_text(), random.Random(4)
    return [text[start : start + n] for n in LENGTHS for start in [rng.randrange(len(text) - n)]]


def complete(served: Served, prompt: list[int], num_tokens: int = NEW_TOKENS) -> tuple[Answer, int]:
    """A greedy answer, and how many tokens of the prompt were cached."""
    with served.client(timeout=300) as client:
        done: Completion = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=num_tokens, temperature=0, logprobs=0,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )  # fmt: skip
    logprobs, usage = done.choices[0].logprobs, done.usage
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert usage is not None and usage.prompt_tokens_details is not None
    found = Answer(list(logprobs.tokens), [one or 0.0 for one in logprobs.token_logprobs])
    return found, usage.prompt_tokens_details.cached_tokens or 0


def find_errors(found: list[Answer], codec: str, file: str = "") -> list[float]:
    """Differences of the log-probabilities from those of one worker alone; at least 99 % of the answers are its own."""
    wanted = [expected(codec, number, file) for number in range(len(found))]
    other = [
        len(prompts()[n])
        for n, (one, two) in enumerate(zip(found, wanted, strict=True))
        if one.tokens != two.tokens
    ]
    assert len(other) <= len(found) // 100, f"prompts of these lengths went astray: {other}"
    return [
        abs(a - b)
        for one, two in zip(found, wanted, strict=True)
        if one.tokens == two.tokens
        for a, b in zip(one.logprobs, two.logprobs, strict=True)
    ]


def assert_same(found: list[Answer], codec: str, file: str = "") -> None:
    """At least 99 % of the answers are those of one worker alone, and their log-probabilities are close."""
    assert max(find_errors(found, codec, file)) <= SAME


def ask_all(served: Served) -> tuple[list[Answer], list[int]]:
    """All prompts at once: the answers, and the numbers of cached tokens."""
    answers = call_at_once([partial(complete, served, prompt) for prompt in prompts()])
    return [answer for answer, _ in answers], [cached for _, cached in answers]


SIZED = ("--max-model-len", str(CONTEXT))


@pytest.fixture(scope="module")
def calibrated() -> Iterator[Served]:
    """One prefill and two decode workers with the calibration of the embedded model."""
    pools = ("--prefill", "1", "--decode", "2")
    with serve_parts(*pools, "--kv-cache-codec", CALIBRATED, *SIZED) as served:
        yield served


def test_kv_that_moved_or_was_cached_gives_the_tokens_of_one_worker(calibrated: Served) -> None:
    """Cold, and then again: prefix hit = miss. What moved and what is stored is coded, to the byte."""
    layout = lone_worker(CALIBRATED).layout
    bytes_before, before = calibrated.moved_bytes()
    cold = [complete(calibrated, prompt) for prompt in prompts()]
    bytes_after, after = calibrated.moved_bytes()
    assert [cached for _, cached in cold] == [0] * len(cold)
    assert_same([answer for answer, _ in cold], CALIBRATED)
    chunks = sum(layout.num_chunks(n) for n in LENGTHS) + after - before - len(LENGTHS)
    assert bytes_after - bytes_before == chunks * layout.chunk_bytes, "canaries move one chunk each"
    again, cached = ask_all(calibrated)
    assert cached == [(n - 1) // 64 * 64 for n in LENGTHS]
    assert_same(again, CALIBRATED)


def test_the_class_of_each_worker_is_shown(calibrated: Served) -> None:
    layout = lone_worker(CALIBRATED).layout
    state = calibrated.status()
    assert {name for one in state["workers"] for name in one["kv_classes"]} == {layout.codec}
    for one in state["workers"]:
        shown = one["kv_classes"][layout.codec]
        stats = one["stats"]
        use = {"used": stats["slabs_used"], "cached": stats["slabs_cached"]}
        assert shown == {"slabs": stats["slabs_total"], "chunk_bytes": layout.chunk_bytes} | use
        labels = {"worker": one["worker"], "kv_class": layout.codec}
        assert calibrated.metric("diptych:kv_class_chunk_bytes", **labels) == layout.chunk_bytes


def test_an_answer_goes_on_when_its_decode_worker_is_killed(calibrated: Served) -> None:
    """It is read again, prompt and answer so far, and goes on as that of one worker alone."""
    # So long that it is not over when a heartbeat says who decodes it.
    prompt, num_tokens = prompts()[LENGTHS.index(200)][:150], 850
    wanted = lone_worker(CALIBRATED).answer(prompt, num_tokens)
    migrated = calibrated.metric("diptych:migrated_streams_total")
    tokens: list[str] = []
    killed_at = 0
    with openai.OpenAI(base_url=f"{calibrated.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=num_tokens, temperature=0, logprobs=0, stream=True,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )  # fmt: skip
        for event in stream:
            for choice in event.choices:
                tokens += (choice.logprobs.tokens or []) if choice.logprobs else []
            if len(tokens) >= 5 and not killed_at and (busy := calibrated.writers()):
                calibrated.worker(busy[0]).kill()
                killed_at = len(tokens)
    assert killed_at and len(tokens) == num_tokens
    assert calibrated.metric("diptych:migrated_streams_total") == migrated + 1
    assert tokens[: killed_at + 60] == wanted.tokens[: killed_at + 60]
    wait_for(lambda: calibrated.held() == {})


def test_a_pool_too_small_for_all_requests_gives_the_tokens_of_one_worker() -> None:
    """Requests wait, prefixes are evicted, and swap space is at hand."""
    layout = lone_worker(ROUNDED).layout
    pool = str(10 * layout.chunk_bytes)
    small = ("--kv-cache-memory-bytes", pool, "--swap-space", "1MiB", "--max-model-len", "512")
    with serve_parts("--colocated", "1", "--kv-cache-codec", ROUNDED, *small) as served:
        answers, _ = ask_all(served)
        assert_same(answers, ROUNDED)
        wait_for(lambda: served.held() == {})


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kv_of_two_classes_moves_between_one_rank_and_two(role: str) -> None:
    """A codec that codes each head alone can be split in any way; pages of both are the same bytes."""
    pools = ("--prefill", "1", "--decode", "1", f"--{role}-tp", "2")
    with serve_parts(*pools, "--kv-cache-codec", f"raw:0.5,{ROTATED}", *SIZED) as served:
        layouts = {kv: lone_worker(kv).layout for kv in ("raw", ROTATED)}
        for kv, layout in layouts.items():
            chunks_before, before = served.moved_chunks(layouts["raw"].chunk_bytes)
            found = [ask_for(served, number, kv) for number in range(8)]
            assert {applied for _, _, applied in found} == {layout.kv_class}
            errors = find_errors([answer for answer, _, _ in found], kv)
            close = sum(error <= SAME for error in errors)
            assert (
                (close == len(errors))
                if kv == "raw"
                else (close >= MOST * len(errors) and max(errors) <= FAR)
            )
            chunks_after, after = served.moved_chunks(layouts["raw"].chunk_bytes)
            canaries = after - before - len(found)
            chunks = sum(layout.num_chunks(length) for length in LENGTHS[: len(found)])
            assert chunks_after - chunks_before - canaries == pytest.approx(chunks)
        wait_for(lambda: served.held() == {})


CLASSES = ("raw", CALIBRATED)
BOTH_CODECS = f"raw:0.5,{CALIBRATED}"
# Prompts that no other test asks with, in tokens; and how far a prediction may be off.
FRESH_LENGTHS, CLOSE = (30, 64, 200, 500, 900), 0.05


def ask_for(
    served: Served, number: int, kv: str | None, num_tokens: int = NEW_TOKENS
) -> tuple[Answer, int, str]:
    """The answer to a prompt in a KV class (None: unsaid), its cached tokens, and the class that was applied."""
    body: dict[str, Any] = {"ignore_eos": True, "skip_special_tokens": False}
    with served.client(timeout=300) as client:
        response = client.completions.with_raw_response.create(
            model="tiny", prompt=prompts()[number], max_tokens=num_tokens, temperature=0, logprobs=0,
            extra_body=body | ({} if kv is None else {"diptych": {"kv": kv}}),
        )  # fmt: skip
        done: Completion = response.parse()
    logprobs, usage = done.choices[0].logprobs, done.usage
    assert logprobs is not None and usage is not None and usage.prompt_tokens_details is not None
    found = Answer(list(logprobs.tokens or ()), [one or 0.0 for one in logprobs.token_logprobs or ()])
    applied = response.headers.get("x-diptych-kv-class", "raw")
    assert done.system_fingerprint is not None and (applied == "raw") != done.system_fingerprint.endswith(
        applied
    )
    return found, usage.prompt_tokens_details.cached_tokens or 0, applied


@pytest.fixture(scope="module")
def both_classes() -> Iterator[Served]:
    """One prefill and one decode worker, each with room for raw and for coded KV."""
    pools = ("--prefill", "1", "--decode", "1")
    with serve_parts(*pools, "--kv-cache-codec", BOTH_CODECS, *SIZED) as served:
        yield served


def test_requests_of_two_classes_side_by_side_are_those_of_one_worker_each(both_classes: Served) -> None:
    """Cold, then from the cache. Nothing that one class published is a hit for the other."""
    layouts = {kv: lone_worker(kv).layout for kv in CLASSES}
    prompts()  # made once, before there are threads
    for chunks_cached in (False, True):
        asked = [(number, kv) for number in range(len(LENGTHS)) for kv in CLASSES]
        answered = call_at_once([partial(ask_for, both_classes, number, kv) for number, kv in asked])
        for kv in CLASSES:
            mine = [one for one, (_, asked_kv) in zip(answered, asked, strict=True) if asked_kv == kv]
            assert_same([answer for answer, _, _ in mine], kv)
            assert {applied for _, _, applied in mine} == {layouts[kv].kv_class}
            hits = [(n - 1) // 64 * 64 if chunks_cached else 0 for n in LENGTHS]
            assert [cached for _, cached, _ in mine] == hits
    assert ask_for(both_classes, 3, None)[2] == "raw", "the first named class is the default"
    wait_for(lambda: both_classes.held() == {})


def test_classes_with_factors_are_those_of_one_worker_each(tmp_path: Path) -> None:
    """Each head has factors of its own. An id without a calibration is never that with one."""
    file, codecs = str(tmp_path / "factors"), "int4:0.5,tq4"
    digest = write_factored(Path(file), "int4", "tq4")
    pools = ("--prefill", "1", "--decode", "1", "--kv-cache-calibration", file)
    prompts()
    numbers = [LENGTHS.index(length) for length in (2, 64, 129, 448)]
    with serve_parts(*pools, "--kv-cache-codec", codecs, *SIZED) as served:
        ids = {kv: lone_worker(kv, file).layout.kv_class for kv in ("int4", "tq4")}
        assert [*ids.values()] == [f"int4.g32@{digest}", f"tq4.s0@{digest}"]
        for chunks_cached in (False, True):
            for kv, kv_class in ids.items():
                for number in numbers:
                    found, cached, applied = ask_for(served, number, kv)
                    wanted = expected(kv, number, file)
                    assert (applied, found.tokens) == (kv_class, wanted.tokens)
                    assert found.logprobs == pytest.approx(wanted.logprobs, abs=SAME)
                    assert cached == ((LENGTHS[number] - 1) // 64 * 64 if chunks_cached else 0)
        for other in ("int4.g32", "tq4.s0"):
            with pytest.raises(openai.BadRequestError, match=other):
                ask_for(served, 0, other)
        wait_for(lambda: served.held() == {})


def test_the_router_chooses_the_class_where_a_request_leaves_it_to_the_router(both_classes: Served) -> None:
    """Workers say what their calibration recorded, so both classes come into question."""
    shown = both_classes.status()["kv_auto"]
    coded = lone_worker(CALIBRATED).layout.kv_class
    assert (shown["budget_pct"], shown["classes"]) == (1.0, [coded, "raw"])
    with both_classes.client(timeout=300) as client:
        done = client.completions.create(
            model="tiny", prompt=prompts()[0], max_tokens=4, extra_body={"diptych": {"kv": "auto"}}
        )
    assert done.usage is not None and done.usage.model_extra is not None
    applied = done.usage.model_extra["diptych"]
    classes = {"quality": "raw", "prefix": "raw", "pool": coded, "link": coded}
    assert applied["kv_class"] == classes[applied["kv_reason"]]
    labels = {"kv_class": applied["kv_class"], "reason": applied["kv_reason"]}
    assert both_classes.metric("diptych:kv_class_requests_total", **labels) >= 1


def test_both_classes_are_shown_and_no_other_is_served(both_classes: Served) -> None:
    layouts = [lone_worker(kv).layout for kv in CLASSES]
    for kv in CLASSES:
        ask_for(both_classes, LENGTHS.index(129), kv)
    wait_for(
        lambda: all(
            use["cached"] and not use["used"]
            for one in both_classes.status()["workers"]
            for use in one["kv_classes"].values()
        )
    )
    for one in both_classes.status()["workers"]:
        shown = one["kv_classes"]
        assert list(shown) == [layout.kv_class for layout in layouts]
        assert [shown[layout.kv_class]["chunk_bytes"] for layout in layouts] == [
            x.chunk_bytes for x in layouts
        ]
        assert sum(kind["slabs"] for kind in shown.values()) == one["stats"]["slabs_total"]
        for kind in ("used", "cached"):
            assert sum(use[kind] for use in shown.values()) == one["stats"][f"slabs_{kind}"]
        sizes = [shown[layout.kv_class]["slabs"] * layout.chunk_bytes for layout in layouts]
        assert max(sizes) - min(sizes) <= layouts[0].chunk_bytes, "half of the pool each"
    names = {layout.kv_class: True for layout in layouts}
    assert both_classes.status()["kv_classes"] == names
    assert [link["kv_classes"] for link in both_classes.status()["links"]] == [names]
    with pytest.raises(openai.BadRequestError, match="and raw") as caught:
        ask_for(both_classes, 0, "tq4")
    assert CALIBRATED in str(caught.value) and caught.value.param == "diptych.kv"


def predicted_deployment(pool_bytes: int, context: int) -> SimDeployment:
    """What `diptych simulate` predicts for such workers, by a profile of KV as it was computed."""
    raw = built_in_profile("embedded", "cpu")
    room = int(pool_bytes / raw.model.kv_token_bytes)
    profile = replace(raw, rooms={Parallelism(): room})
    pools = (InstancePool(PREFILL, Parallelism(), 1, "cpu"), InstancePool(DECODE, Parallelism(), 1, "cpu"))
    made = build_deployment(Placement(pools), profile, kv_classes=plan_kv_classes(profile, BOTH_CODECS))
    return replace(made, max_model_len=context)


def test_room_and_moved_bytes_of_each_class_are_as_predicted(both_classes: Served) -> None:
    """Slabs, streams of 1,024 tokens and bytes on the wire, within 5 %. Canaries move one chunk each."""
    status = both_classes.status()
    layouts = {kv: lone_worker(kv).layout for kv in CLASSES}
    rng = random.Random(8)
    raw_bytes = layouts["raw"].chunk_bytes

    def ask_fresh(kv: str, length: int) -> None:
        with both_classes.client(timeout=300) as client:
            client.completions.create(
                model="tiny", prompt=[rng.randrange(100, 1000) for _ in range(length)], max_tokens=4,
                temperature=0, extra_body={"ignore_eos": True, "diptych": {"kv": kv}},
            )  # fmt: skip

    for worker in status["workers"]:
        shown = worker["kv_classes"]
        # The pool has whole chunks of raw KV; what its shares leave of the last one is in no slab.
        used, chunk = (
            sum(kind["slabs"] * kind["chunk_bytes"] for kind in shown.values()),
            layouts["raw"].chunk_bytes,
        )
        deployment = predicted_deployment(-(-used // chunk) * chunk, status["max_model_len"])
        for machine in deployment.instances:
            slabs = class_slabs(machine, deployment.kv_classes)
            for kv, layout in layouts.items():
                measured = shown[layout.kv_class]["slabs"]
                assert slabs[kv] == pytest.approx(measured, rel=CLOSE)
                assert slabs[kv] * 64 // 1024 == pytest.approx(measured * 64 // 1024, rel=CLOSE)
    for kv in CLASSES:
        chunks_before, before = both_classes.moved_chunks(raw_bytes)
        for length in FRESH_LENGTHS:
            ask_fresh(kv, length)
        chunks_after, after = both_classes.moved_chunks(raw_bytes)
        canaries = after - before - len(FRESH_LENGTHS)
        measured = (chunks_after - chunks_before - canaries) * layouts[kv].chunk_bytes
        jobs = [Job(float(at_s), n, 4, kv_class=kv) for at_s, n in enumerate(FRESH_LENGTHS)]
        predicted = sum(one.moved_bytes for one in simulate_exact(deployment, jobs))
        assert measured == pytest.approx(predicted, rel=CLOSE)


def test_an_answer_stays_with_its_class_when_its_decode_worker_is_killed(both_classes: Served) -> None:
    prompt, num_tokens = prompts()[LENGTHS.index(200)], 400
    wanted = lone_worker(CALIBRATED).answer(prompt, num_tokens)
    migrated = both_classes.metric("diptych:migrated_streams_total")
    # Looked up before: the answer must not be over when it is killed.
    writer = both_classes.worker("decode-0")
    tokens: list[str] = []
    killed = False
    with both_classes.client(timeout=300) as client:
        response = client.completions.with_raw_response.create(
            model="tiny", prompt=prompt, max_tokens=num_tokens, temperature=0, logprobs=0, stream=True,
            extra_body={"ignore_eos": True, "skip_special_tokens": False, "diptych": {"kv": CALIBRATED}},
        )  # fmt: skip
        assert response.headers["x-diptych-kv-class"] == lone_worker(CALIBRATED).layout.kv_class
        for event in response.parse():
            for choice in event.choices:
                tokens += (choice.logprobs.tokens or []) if choice.logprobs else []
            if len(tokens) >= 5 and not killed:
                writer.kill()
                killed = True
    assert len(tokens) == num_tokens and tokens[:60] == wanted.tokens[:60]
    assert both_classes.metric("diptych:migrated_streams_total") == migrated + 1
    wait_for(lambda: both_classes.held() == {})
