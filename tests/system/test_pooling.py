"""Embeddings from prefill workers alone, over HTTP and real processes, as transformers computes them.

One deployment has decode workers, which are stopped; one has none.
"""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from services.gateway.pooling.pair_prompt import DEFAULT_INSTRUCTION, QWEN3_PROMPT
from tests.support.deployment import Served, call_at_once, serve_parts, wait_for
from tests.support.factories import make_tokenizer
from tests.support.pooling_models import embed_tokens, make_embedder, make_reranker, score_tokens

pytestmark = pytest.mark.timeout(600)

SIZED = ("--kv-cache-memory-bytes", "8M", "--max-num-batched-tokens", "96")
TEXTS = [f"Text {number}: " + "a quick brown fox " * (3 * number) for number in range(1, 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "embedder"


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return make_embedder(folder)


@pytest.fixture(scope="module")
def pair(folder: Path, oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("data")
    flags = ("--model", str(folder), "--prefill", "2", "--decode", "1", "--data-dir", str(data))
    with serve_parts(*flags, "--served-model-name", "toy", *SIZED) as served:
        yield served


def tokens_of(text: str) -> list[int]:
    ids: list[int] = make_tokenizer(320)(text)["input_ids"]
    return ids


def post(served: Served, path: str, timeout_s: float = 60, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}{path}", json={"model": "toy", **body}, timeout=timeout_s)


def vectors(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [np.array(one["embedding"]) for one in answer.json()["data"]]


def assert_as_transformers(oracle: Any, found: list[Any], texts: list[str]) -> None:
    for vector, text in zip(found, texts, strict=True):
        assert abs(vector - embed_tokens(oracle, tokens_of(text))).max() <= 1e-5


def test_the_four_forms_of_input_give_what_transformers_gives(pair: Served, oracle: Any) -> None:
    assert_as_transformers(oracle, vectors(post(pair, "/v1/embeddings", input=TEXTS[0])), TEXTS[:1])
    assert_as_transformers(oracle, vectors(post(pair, "/v1/embeddings", input=TEXTS)), TEXTS)
    ids = [tokens_of(text) for text in TEXTS]
    assert_as_transformers(oracle, vectors(post(pair, "/v1/embeddings", input=ids)), TEXTS)
    assert_as_transformers(oracle, vectors(post(pair, "/v1/embeddings", input=ids[1])), TEXTS[1:2])
    answer = post(pair, "/v1/embeddings", input=TEXTS).json()
    assert [one["index"] for one in answer["data"]] == list(range(len(TEXTS)))
    assert answer["object"] == "list" and answer["data"][0]["object"] == "embedding"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, ids))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    wait_for(lambda: not pair.held(), explain=pair.held)


def test_openais_client_reads_them(pair: Served, oracle: Any) -> None:
    """It asks for base64 unless told otherwise."""
    with pair.client() as client:
        plain = client.embeddings.create(model="toy", input=TEXTS, encoding_format="float")
        packed = client.embeddings.create(model="toy", input=TEXTS, user="somebody")
        cut = client.embeddings.create(model="toy", input=TEXTS[2], dimensions=16)
    for one, other in zip(plain.data, packed.data, strict=True):
        assert np.allclose(one.embedding, other.embedding, atol=1e-7)
    wanted = embed_tokens(oracle, tokens_of(TEXTS[2]), 16)
    assert abs(np.array(cut.data[0].embedding) - wanted).max() <= 1e-5
    raw = post(pair, "/v1/embeddings", input=TEXTS[0], encoding_format="base64").json()
    assert len(base64.b64decode(raw["data"][0]["embedding"])) == 4 * oracle.config.hidden_size


def test_they_are_answered_while_the_decode_worker_is_stopped(pair: Served, oracle: Any) -> None:
    decode = pair.worker("decode-0")
    decode.suspend()
    try:
        found = call_at_once([lambda: post(pair, "/v1/embeddings", input=TEXTS)] * 4)
        for answer in found:
            assert_as_transformers(oracle, vectors(answer), TEXTS)
    finally:
        decode.resume()
    wait_for(pair.ready)
    wait_for(lambda: not pair.held(), explain=pair.held)


def test_a_prefill_worker_dies_and_nobody_sees_it(pair: Served, oracle: Any) -> None:
    texts = [[f"{i}{j}" + "x" * 480 for j in range(40)] for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(post, pair, "/v1/embeddings", input=some) for some in texts]
        wait_for(lambda: pair.metric("vllm:num_requests_running", engine="prefill-0") > 0)
        os.kill(pair.worker("prefill-0").pid, signal.SIGKILL)
        answers = [one.result() for one in asked]
    for answer, some in zip(answers, texts, strict=True):
        assert_as_transformers(oracle, vectors(answer), some)
    assert pair.metric("diptych:request_retries_total", code="worker_lost") > 0
    wait_for(lambda: pair.ready() and not pair.held(), explain=pair.held)


def test_answers_and_embeddings_share_a_deployment(pair: Served, oracle: Any) -> None:
    def chat() -> str:
        answer = post(pair, "/v1/completions", prompt="abc" * 50, max_tokens=30, temperature=0)
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    alone = chat()
    embed = lambda: vectors(post(pair, "/v1/embeddings", input=TEXTS))  # noqa: E731
    found: list[Any] = call_at_once([chat, embed, chat])
    assert found[0] == found[2] == alone
    assert_as_transformers(oracle, found[1], TEXTS)


def test_a_client_that_leaves_frees_all(pair: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        post(pair, "/v1/embeddings", timeout_s=0.05, input=[f"{i}" + "y" * 500 for i in range(200)])
    wait_for(lambda: not pair.held(), explain=pair.held)
    late = post(pair, "/v1/embeddings", input="a")
    assert late.status_code == 200


def test_a_batch_takes_them(pair: Served, oracle: Any) -> None:
    lines = [
        {
            "custom_id": f"{i}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "toy", "input": text},
        }
        for i, text in enumerate(TEXTS)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with pair.client() as client:
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        wait_for(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"))
        done = client.batches.retrieve(batch.id)
        assert done.status == "completed" and done.output_file_id, done
        results = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    found = {one["custom_id"]: one["response"]["body"]["data"][0]["embedding"] for one in results}
    assert_as_transformers(oracle, [np.array(found[f"{i}"]) for i in range(len(TEXTS))], TEXTS)
    wait_for(lambda: not pair.held(), explain=pair.held)


def test_requests_are_counted_by_route(pair: Served) -> None:
    before = pair.metric("diptych:pooled_request_seconds_count", route="embeddings")
    post(pair, "/v1/embeddings", input="count me")
    assert pair.metric("diptych:pooled_request_seconds_count", route="embeddings") == before + 1
    assert pair.metric("diptych:http_requests_total", route="/v1/embeddings", status="200") > 0


def test_a_deployment_without_decode_workers(folder: Path, oracle: Any) -> None:
    flags = ("--model", str(folder), "--prefill", "1", "--decode", "0", "--served-model-name", "toy", *SIZED)
    with serve_parts(*flags) as served:
        assert served.ready()
        assert served.get("/ready").json()["reasons"] == []
        assert_as_transformers(oracle, vectors(post(served, "/v1/embeddings", input=TEXTS)), TEXTS)
        refused = post(served, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "only_pooling")
        wait_for(lambda: not served.held(), explain=served.held)
        assert served.status()["workers"][0]["stats"]["slabs_used"] == 0


def test_a_model_that_scores_ranks_documents(tmp_path: Path) -> None:
    folder = tmp_path / "reranker"
    oracle = make_reranker(folder, max_position_embeddings=1024)
    prompts = [
        QWEN3_PROMPT.format(instruction=DEFAULT_INSTRUCTION, query="fox", document=text) for text in TEXTS
    ]
    wanted = [score_tokens(oracle, tokens_of(prompt)) for prompt in prompts]
    flags = ("--model", str(folder), "--prefill", "2", "--decode", "0", "--served-model-name", "toy", *SIZED)
    with serve_parts(*flags) as served:
        scored = post(served, "/v1/score", text_1="fox", text_2=TEXTS).raise_for_status().json()
        ranked = post(served, "/rerank", query="fox", documents=TEXTS, top_n=3).raise_for_status().json()
        refused = post(served, "/v1/embeddings", input="fox")
        wait_for(lambda: not served.held(), explain=served.held)
    assert np.abs(np.array([one["score"] for one in scored["data"]]) - wanted).max() <= 1e-5
    best = sorted(range(len(TEXTS)), key=lambda index: -wanted[index])[:3]
    assert [one["index"] for one in ranked["results"]] == best
    assert ranked["results"][0]["document"] == {"text": TEXTS[best[0]]}
    assert ranked["usage"]["total_tokens"] == sum(len(tokens_of(prompt)) for prompt in prompts)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
