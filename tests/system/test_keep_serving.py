"""Deployments that evict: what answers tell, and that they are the same however often they are computed, and where."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from planner.costs.profile_file import built_in_profile
from planner.sim.exact.deployment import build_deployment
from planner.sim.exact.simulate import simulate_exact
from planner.types import DECODE, PREFILL, InstancePool, Job, KvKeep, LinkSpec, Parallelism, Placement
from tests.support.deployment import Served, serve_parts
from tests.system.kept_answers import CONTEXT, NEW_TOKENS, SLOTS, KeptAnswer, complete
from tests.system.transformers_oracle import TINY, read_text

pytestmark = pytest.mark.timeout(600)

LENGTHS = (16, 200, 448)
# Low, so that heads of this model drop something.
LOW = 0.75
# Requests get raw KV unless they ask for the codec.
CODEC = "nuq3-1%"
SIZED = ("--max-model-len", str(CONTEXT), "--kv-cache-codec", f"raw:0.6,{CODEC}")


@cache
def prompts() -> list[list[int]]:
    """Real text, each prompt cut from another place."""
    text, rng = read_text(), random.Random(17)
    return [text[start : start + n] for n in LENGTHS for start in [rng.randrange(len(text) - n)]]


@pytest.fixture(scope="module")
def pair() -> Iterator[Served]:
    """One prefill and two decode workers, which evict by default as they do not in these tests' requests."""
    with serve_parts("--prefill", "1", "--decode", "2", "--kv-keep", "0.99", *SIZED) as served:
        yield served


@pytest.fixture(scope="module")
def colocated() -> Iterator[Served]:
    with serve_parts("--colocated", "1", *SIZED) as served:
        yield served


@pytest.fixture(scope="module")
def alone(colocated: Served) -> list[KeptAnswer]:
    """The answers of one worker that does everything itself."""
    return [complete(colocated, prompt, LOW) for prompt in prompts()]


def test_answers_tell_what_was_kept_and_freed(colocated: Served, alone: list[KeptAnswer]) -> None:
    for length, answer in zip(LENGTHS, alone, strict=True):
        keep, kv = answer.keep, answer.kv
        assert ".keep0.75.zap@" in answer.fingerprint
        assert kv is not None and (kv["kv_class"], kv["kv_bytes_saved_per_token"]) == ("raw", 0)
        assert (keep["threshold"], keep["boundary"], sum(keep["heads"].values())) == (LOW, 0, SLOTS)
        # The last decision came after a whole number of chunks of the answer.
        decided = length + (NEW_TOKENS - 1) // 64 * 64
        assert keep["all_rows"] == decided * SLOTS and 0 < keep["kept_rows"] <= keep["all_rows"]
    longest = alone[-1].keep
    assert longest["kept_rows"] < longest["all_rows"] and longest["freed_bytes"] > 0
    row_bytes = colocated.status()["workers"][0]["kv_classes"]["raw"]["chunk_bytes"] / 64 / SLOTS
    for outcome, rows in {
        "kept": sum(answer.keep["kept_rows"] for answer in alone),
        "dropped": sum(answer.keep["all_rows"] - answer.keep["kept_rows"] for answer in alone),
    }.items():
        counted = colocated.metric("diptych:kv_pruned_bytes_total", outcome=outcome)
        assert counted == pytest.approx(rows * row_bytes)
    assert colocated.metric("diptych:kv_pruned_heads_total") == SLOTS * len(alone)
    assert colocated.metric("diptych:kv_pruned_freed_bytes_total") >= longest["freed_bytes"]


def test_a_hit_and_a_hand_over_give_the_tokens_of_one_worker(
    colocated: Served, pair: Served, alone: list[KeptAnswer]
) -> None:
    cold = [complete(pair, prompt, LOW) for prompt in prompts()]
    warm = [complete(pair, prompt, LOW) for prompt in prompts()]
    here = [complete(colocated, prompt, LOW) for prompt in prompts()]
    for answers in (cold, warm, here):
        assert [one.tokens for one in answers] == [one.tokens for one in alone]
        assert [one.keep for one in answers] == [one.keep for one in alone]
    # Rows are judged by what they are, so that none is computed for that.
    assert [one.cached for one in warm] == [(length - 1) // 64 * 64 for length in LENGTHS]


@pytest.mark.parametrize(("rule", "profiled"), [("ada", 64), ("fastgen", CONTEXT)])
def test_each_rule_gives_the_tokens_of_one_worker(
    colocated: Served, pair: Served, rule: str, profiled: int
) -> None:
    """Rows of the prompt by which heads are judged are computed, however much is cached."""
    keep = {"threshold": LOW, "rule": rule}
    alone = [complete(colocated, prompt, keep) for prompt in prompts()]
    for _ in range(2):
        answers = [complete(pair, prompt, keep) for prompt in prompts()]
        assert [one.tokens for one in answers] == [one.tokens for one in alone]
        assert [one.keep for one in answers] == [one.keep for one in alone]
    assert [one.cached for one in answers] == [max(0, length - profiled) // 64 * 64 for length in LENGTHS]
    assert {one.keep["rule"] for one in answers} == {rule}


def test_codes_are_evicted_and_moved_as_they_are(colocated: Served, pair: Served) -> None:
    """A class of codes and a threshold together: the tokens of one worker, handed over and from the cache."""
    alone = [complete(colocated, prompt, LOW, kv=CODEC) for prompt in prompts()]
    cold = [complete(pair, prompt, LOW, kv=CODEC) for prompt in prompts()]
    warm = [complete(pair, prompt, LOW, kv=CODEC) for prompt in prompts()]
    for answers in (cold, warm):
        assert [one.tokens for one in answers] == [one.tokens for one in alone]
        assert [one.keep for one in answers] == [one.keep for one in alone]
    kv, longest = alone[-1].kv, alone[-1].keep
    assert kv is not None and kv["kv_class"].startswith(CODEC) and ".keep0.75.zap@" in alone[-1].fingerprint
    assert longest["kept_rows"] < longest["all_rows"] and longest["freed_bytes"] > 0
    whole = [complete(pair, prompt, 1, kv=CODEC) for prompt in prompts()]
    assert [one.tokens for one in whole] != [one.tokens for one in alone]


def test_a_boundary_keeps_what_is_before_it(pair: Served) -> None:
    answer = complete(pair, prompts()[-1], {"threshold": LOW, "boundary": 128})
    decided = LENGTHS[-1] - 128 + (NEW_TOKENS - 1) // 64 * 64
    assert (answer.keep["boundary"], answer.keep["all_rows"]) == (128, decided * SLOTS)


def test_a_threshold_of_one_changes_no_token_and_tells_nothing(pair: Served, colocated: Served) -> None:
    whole = complete(pair, prompts()[-1], 1)
    assert whole.kv is None and "keep" not in whole.fingerprint
    assert complete(colocated, prompts()[-1], None).tokens == whole.tokens


def test_the_default_of_the_deployment_counts_where_a_request_says_nothing(pair: Served) -> None:
    answer = complete(pair, prompts()[-1], None, 2)
    assert answer.keep["threshold"] == 0.99 and ".keep0.99.zap@" in answer.fingerprint
    state = pair.status()
    eviction = state["kv_keep"]
    classes = list(state["kv_classes"])
    assert classes[0] == "raw" and classes[1].startswith(CODEC)
    assert (eviction["threshold"], sorted(eviction["classes"])) == (0.99, sorted(classes))
    shares = {one["threshold"]: one["kept_share"] for one in eviction["measured"] if one["kv_class"] == "raw"}
    assert shares and all(0 < share <= 1 for share in shares.values())
    assert [one["keep_classes"] for one in state["workers"]] == [classes] * 3


def test_scores_of_a_prompt_are_those_without_eviction(pair: Served) -> None:
    scores = []
    with pair.client(timeout=300) as client:
        for keep in (LOW, 1):
            done = client.completions.create(
                model="tiny", prompt=prompts()[-1], max_tokens=2, temperature=0, logprobs=0, echo=True,
                extra_body={"diptych": {"keep": keep}},
            )  # fmt: skip
            logprobs = done.choices[0].logprobs
            assert logprobs is not None and logprobs.token_logprobs is not None
            scores.append(logprobs.token_logprobs[: LENGTHS[-1]])
    assert scores[0] == scores[1]


def test_an_answer_goes_on_when_its_decode_worker_is_killed(pair: Served, colocated: Served) -> None:
    """It is read again, prompt and answer so far, decides as before, and goes on with the same tokens."""
    # So long that it is not over when a heartbeat says who decodes it.
    prompt, num_tokens = prompts()[LENGTHS.index(200)][:150], 850
    wanted = complete(colocated, prompt, LOW, num_tokens)
    migrated = pair.metric("diptych:migrated_streams_total")
    tokens: list[str] = []
    killed = False
    with pair.client(timeout=300) as client:
        stream = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=num_tokens, temperature=0, logprobs=0, stream=True,
            extra_body={"ignore_eos": True, "skip_special_tokens": False, "diptych": {"keep": LOW}},
        )  # fmt: skip
        for chunk in stream:
            if chunk.choices and chunk.choices[0].logprobs is not None:
                tokens += chunk.choices[0].logprobs.tokens or []
            if not killed and len(tokens) > 100 and (busy := pair.writers()):
                pair.worker(busy[0]).kill()
                killed = True
    assert killed and tokens == wanted.tokens
    assert pair.metric("diptych:migrated_streams_total") > migrated


def test_predicted_bytes_are_those_that_move(pair: Served) -> None:
    """With the share that is measured of the same prompts, as `diptych profile --kv-keep` does.

    Canaries of both classes pass meanwhile, more of them the slower the machine is; each moves one whole chunk.
    """
    text, rng, lengths = read_text(), random.Random(29), [600 + 30 * number for number in range(14)]
    chunk_bytes = pair.status()["workers"][0]["kv_classes"]["raw"]["chunk_bytes"]
    chunks_before, before = pair.moved_chunks(chunk_bytes)
    starts = [rng.randrange(len(text) - n) for n in lengths]
    kept = [complete(pair, text[at : at + n], LOW, 3).keep for at, n in zip(starts, lengths, strict=True)]
    chunks_after, after = pair.moved_chunks(chunk_bytes)
    canaries = after - before - len(lengths)
    measured = (chunks_after - chunks_before - canaries) * chunk_bytes
    share = sum(one["kept_rows"] for one in kept) / sum(one["all_rows"] for one in kept)
    pools = tuple(InstancePool(role, Parallelism(), 1, "cpu") for role in (PREFILL, DECODE))
    deployment = build_deployment(
        Placement(pools),
        built_in_profile("embedded", "cpu"),
        link=LinkSpec(1e9, 1e-4),
        keep=KvKeep(LOW, share),
    )
    served = simulate_exact(deployment, [Job(float(at_s), n, 3) for at_s, n in enumerate(lengths)])
    predicted = sum(one.moved_bytes for one in served)
    whole = sum(-(-n // 64) for n in lengths) * chunk_bytes
    shares = f"predicted {predicted / whole:.3f} of the bytes of whole KV, measured {measured / whole:.3f}"
    print(f"{shares}, {canaries:.0f} canaries")
    assert measured == pytest.approx(predicted, rel=0.03) and measured < 0.97 * whole


@pytest.mark.parametrize(
    ("keep", "param", "named"),
    [
        (0, "diptych.keep", "> 0"),
        (1.5, "diptych.keep", "<= 1"),
        ({"threshold": 0.9, "boundary": 100}, "diptych.keep.boundary", "64 or 128"),
        ({"threshold": 0.9, "boundary": 512}, "diptych.keep.boundary", "448 tokens"),
    ],
)
def test_what_makes_no_sense_is_a_400(pair: Served, keep: Any, param: str, named: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(pair, prompts()[-1], keep, 2)
    assert caught.value.param == param and named in str(caught.value)


def test_the_system_message_of_a_chat_stays(pair: Served) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    system = tokenizer.decode(prompts()[-1][:150])
    with pair.client(timeout=300) as client:
        done = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "system", "content": system}, {"role": "user", "content": "What is a list?"}],
            max_tokens=4,
            extra_body={"diptych": {"keep": LOW}},
        )
    assert done.usage is not None and done.usage.model_extra is not None
    assert done.usage.model_extra["diptych"]["keep"]["boundary"] == 128
