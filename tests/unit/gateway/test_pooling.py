"""What bodies of the routes that pool ask for, what of them is refused, and the bodies of their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from diptych.errors import ModelError, RequestError
from diptych.failure_statuses import RequestFailure
from diptych.messages import Output
from diptych.request import Pooling
from engine.model.pooling import ModelPooler, read_pooler
from engine.model.tokenizer import ModelTokenizer
from services.gateway.generation.formats import ResponseHead
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.output_text import OutputText
from services.gateway.generation.usage import count_usage
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.validate import RequestRules
from services.gateway.pooling.pair_prompt import DEFAULT_INSTRUCTION
from services.gateway.pooling.pooled_format import EmbeddingFormat, RerankFormat, ScoreFormat
from services.gateway.preparation.resolve_body import resolve_body
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import TEMPLATE, make_folder
from tests.support.pooling_models import write_modules

EMBEDDER = ModelPooler(Pooling("last", normalize=True), size=8)
SCORER = ModelPooler(Pooling("score", tokens=(5, 6)), size=1)
FORMATS: dict[str, type[EmbeddingFormat] | type[RerankFormat] | type[ScoreFormat]] = {
    "embedding": EmbeddingFormat,
    "rerank": RerankFormat,
    "score": ScoreFormat,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> GatewayTokenizer:
    return GatewayTokenizer.load(str(make_folder(tmp_path_factory.mktemp("toy"), context=4096)))


def rules_of(tokenizer: GatewayTokenizer, pooler: ModelPooler, **limits: int) -> RequestRules:
    return RequestRules(tokenizer, ("toy",), 512, RequestLimits(max_inputs=8, **limits), pooler=pooler)


def resolve(route: str, rules: RequestRules, **fields: Any) -> ResolvedRequest:
    found = resolve_body(route, msgspec.json.encode(fields), Caller(0.0), rules, lambda grammar, field: None)
    assert isinstance(found, ResolvedRequest)
    # It passes between processes.
    return msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=ResolvedRequest)


def refusal(route: str, rules: RequestRules, **fields: Any) -> RequestFailure:
    with pytest.raises(RequestError) as caught:
        resolve(route, rules, **fields)
    assert caught.value.failure.status in (400, 404)
    return caught.value.failure


def answer(route: str, resolved: ResolvedRequest, vectors: list[list[float]], rules: RequestRules) -> Any:
    texts = []
    for index, (prompt, vector) in enumerate(zip(resolved.prompts, vectors, strict=True)):
        text = OutputText(resolved, index, prompt, rules.tokenizer)
        text.feed_output(Output("r", 1, [], finish="stop", pooled=np.array(vector, "<f4").tobytes()))
        assert text.held_bytes == 4 * len(vector)
        texts.append(text)
    made = FORMATS[route](ResponseHead("id", 1, "toy", None), resolved, LogprobJson(rules.tokenizer))
    usage = count_usage(resolved.prompt_tokens, 0, texts, None)
    return json.loads(b"".join(made.full_body_parts(texts, usage)))


def test_an_embedding_is_pooled_as_the_model_says(tokenizer: GatewayTokenizer) -> None:
    rules = rules_of(tokenizer, EMBEDDER)
    resolved = resolve("embedding", rules, model="toy", input=["one", [1, 2, 3]][:1], user="me")
    assert resolved.sampling.pooling == Pooling("last", normalize=True) and resolved.sampling.max_tokens == 0
    assert [prompt.tokens.tolist() for prompt in resolved.prompts] == [tokenizer.encode("one", True)]
    cut = resolve("embedding", rules, input=[[1, 2], [3]], dimensions=4, encoding_format="base64")
    assert cut.sampling.pooling == Pooling("last", normalize=True, dimensions=4)
    assert [prompt.tokens.tolist() for prompt in cut.prompts] == [[1, 2], [3]]
    found = answer("embedding", cut, [[0.5, -1.0], [2.0, 0.0]], rules)
    assert found["data"][0]["embedding"] == "AAAAPwAAgL8=" and found["data"][1]["index"] == 1
    plain = answer("embedding", resolved, [[0.5, -1.0]], rules)
    assert plain["data"] == [{"index": 0, "embedding": [0.5, -1.0], "object": "embedding"}]
    assert plain["usage"]["prompt_tokens"] == plain["usage"]["total_tokens"] == resolved.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [400]}, "input"),
        ({"input": "word " * 600}, "input"),
        ({"input": [1] * 513}, "input"),
        ({"input": ["a"] * 9}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "model": "other"}, "model"),
        ({}, "input"),
    ],
)
def test_what_is_wrong_is_named(tokenizer: GatewayTokenizer, fields: dict[str, Any], param: str) -> None:
    assert refusal("embedding", rules_of(tokenizer, EMBEDDER), **fields).param == param


def test_lengths_that_a_model_lists_are_the_only_ones(tokenizer: GatewayTokenizer) -> None:
    rules = rules_of(tokenizer, ModelPooler(Pooling("last"), size=8, sizes=(4, 8)))
    assert refusal("embedding", rules, input="a", dimensions=5).param == "dimensions"
    assert resolve("embedding", rules, input="a", dimensions=4).sampling.pooling == Pooling(
        "last", dimensions=4
    )


@pytest.mark.parametrize("route", FORMATS)
def test_a_model_that_cannot_pool_says_why(tokenizer: GatewayTokenizer, route: str) -> None:
    asked: dict[str, dict[str, Any]] = {
        "embedding": {"input": "a"},
        "rerank": {"query": "a", "documents": ["b"]},
    }
    failure = refusal(
        route,
        rules_of(tokenizer, ModelPooler(why="it never learnt it")),
        **asked.get(route, {"text_1": "a", "text_2": "b"}),
    )
    assert failure.param == "model" and "cannot pool: it never learnt it" in failure.message
    if route == "embedding":
        assert "does not embed" in refusal(route, rules_of(tokenizer, SCORER), input="a").message


def test_documents_are_ranked_by_cosine_where_the_model_embeds(tokenizer: GatewayTokenizer) -> None:
    rules = rules_of(tokenizer, EMBEDDER)
    resolved = resolve("rerank", rules, query="q", documents=["far", {"text": "near"}, "middle"], top_n=2)
    assert [rules.tokenizer.decode(prompt.tokens.tolist()) for prompt in resolved.prompts] == [
        "q", "far", "near", "middle",
    ]  # fmt: skip
    found = answer("rerank", resolved, [[1, 0], [0, 3], [5, 0], [1, 1]], rules)
    assert [one["index"] for one in found["results"]] == [1, 2]
    assert found["results"][0]["document"] == {"text": "near"}
    assert found["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert found["results"][1]["relevance_score"] == pytest.approx(0.5**0.5)
    bare = resolve("rerank", rules, query="q", documents=["a"], return_documents=False)
    assert "document" not in answer("rerank", bare, [[1, 0], [1, 0]], rules)["results"][0]


def test_a_model_that_scores_reads_both_texts_in_one_prompt(tokenizer: GatewayTokenizer) -> None:
    rules = rules_of(tokenizer, SCORER)
    resolved = resolve("score", rules, text_1="what", text_2=["this", "that"], instruction="Find it")
    first, second = (tokenizer.decode(prompt.tokens.tolist()) for prompt in resolved.prompts)
    assert "<Instruct>: Find it\n<Query>: what\n<Document>: this" in first and "<Document>: that" in second
    assert resolved.sampling.pooling == Pooling("score", tokens=(5, 6))
    found = answer("score", resolved, [[0.25], [0.75]], rules)
    assert found["data"] == [
        {"index": 0, "score": 0.25, "object": "score"},
        {"index": 1, "score": 0.75, "object": "score"},
    ]
    same = resolve("score", rules, queries=["a", "b"], documents=["c", "d"])
    texts = [tokenizer.decode(prompt.tokens.tolist()) for prompt in same.prompts]
    assert "<Query>: b\n<Document>: d" in texts[1] and DEFAULT_INSTRUCTION in texts[1]
    ranked = resolve("rerank", rules, query="q", documents=["a", "b", "c"])
    results = answer("rerank", ranked, [[0.1], [0.9], [0.9]], rules)["results"]
    assert [one["index"] for one in results] == [1, 2, 0]


def test_a_template_with_a_query_and_a_document_is_used(tmp_path: Path) -> None:
    template = TEMPLATE + "{# 'query' and 'document' #}"
    own = GatewayTokenizer.load(str(make_folder(tmp_path, template=template)))
    resolved = resolve("score", rules_of(own, SCORER), text_1="what", text_2="this")
    text = own.decode(resolved.prompts[0].tokens.tolist(), False)
    assert text == "<|user|>what<|end|><|user|>this<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_1": "a"}, "text_2"),
        ({"queries": "a"}, "documents"),
        ({}, "text_1"),
        ({"text_1": "a", "text_2": "b", "documents": "c"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ({"text_1": "a", "text_2": ["b"] * 9}, "text_2"),
        ({"text_1": "", "text_2": "b"}, "text_1"),
        ({"text_1": "a", "text_2": "word " * 600}, "text_2"),
    ],
)
def test_texts_that_make_no_pairs_are_refused(
    tokenizer: GatewayTokenizer, fields: dict[str, Any], param: str
) -> None:
    for pooler in (EMBEDDER, SCORER):
        assert refusal("score", rules_of(tokenizer, pooler), **fields).param == param


def test_an_instruction_needs_a_model_that_reads_it(tokenizer: GatewayTokenizer) -> None:
    fields = {"query": "a", "documents": ["b"], "instruction": "c"}
    assert refusal("rerank", rules_of(tokenizer, EMBEDDER), **fields).param == "instruction"
    assert refusal("rerank", rules_of(tokenizer, SCORER), query="a", documents=[]).param == "documents"


# ---- what a folder says


def pooler_of(folder: Path, **config: Any) -> ModelPooler:
    known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(known | {"hidden_size": 64} | config), encoding="utf-8")
    return read_pooler(folder, ModelTokenizer.load(folder))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode": "cls", "embedding_dimension": 64}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_a_folder_says_how_it_pools(tmp_path: Path, settings: dict[str, Any], kind: str) -> None:
    folder = make_folder(tmp_path)
    write_modules(folder, ("Pooling", settings))
    assert pooler_of(folder) == ModelPooler(Pooling(kind), size=64)
    write_modules(folder, ("Pooling", settings), ("Normalize", {}))
    found = pooler_of(folder, matryoshka_dimensions=[64, 32])
    assert found == ModelPooler(Pooling(kind, normalize=True), size=64, sizes=(32, 64)) and found.embeds
    assert pooler_of(folder, is_matryoshka=False).sizes == (64,)
    assert "behind" in pooler_of(folder, is_causal=False).why


def test_a_folder_says_how_it_scores(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a", markers=("yes", "no"))
    write_modules(folder, ("LogitScore", {"true_token_id": 9, "false_token_id": 7}))
    assert pooler_of(folder) == ModelPooler(Pooling("score", tokens=(7, 9)), size=1)
    write_modules(folder, ("LogitScore", {"true_token_id": 9, "false_token_id": None}))
    assert pooler_of(folder).scores and pooler_of(folder).pooling == Pooling("score", tokens=(9,))
    (folder / "modules.json").unlink()
    [no], [yes] = (ModelTokenizer.load(folder).backend.encode(word).ids for word in ("no", "yes"))
    assert pooler_of(folder, classifier_from_token=["no", "yes"]).pooling == Pooling(
        "score", tokens=(no, yes)
    )
    assert "not two tokens" in pooler_of(folder, classifier_from_token=["no", "never seen"]).why
    named = make_folder(tmp_path / "Qwen3-Reranker-0.6B", markers=("yes", "no"))
    assert pooler_of(named).scores


def test_what_a_folder_asks_for_and_nobody_computes_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert "no modules.json" in pooler_of(folder).why
    write_modules(folder, ("Pooling", {"pooling_mode_weightedmean_tokens": True}))
    assert "weightedmean_tokens" in pooler_of(folder).why
    write_modules(folder, ("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}))
    assert "cls_token and mean_tokens" in pooler_of(folder).why
    write_modules(folder, ("Pooling", {"pooling_mode_cls_token": True}), ("Dense", {}))
    assert "Dense" in pooler_of(folder).why


@pytest.mark.parametrize(
    "text", ["[", "{}", '[{"idx": 0}]', '[{"idx":0,"type":"a.Transformer","path":"../up"}]']
)
def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path, text: str) -> None:
    folder = make_folder(tmp_path)
    (folder / "modules.json").write_text(text, encoding="utf-8")
    if text == "{}":
        assert "asks for" in pooler_of(folder).why
        return
    with pytest.raises(ModelError) as caught:
        pooler_of(folder)
    assert len(str(caught.value).splitlines()) <= 6


def test_a_query_does_not_multiply_a_body_beyond_its_bound(tokenizer: GatewayTokenizer) -> None:
    rules, query = rules_of(tokenizer, SCORER, max_body_bytes=100), "q" * 24
    assert len(resolve("rerank", rules, model="toy", query=query, documents=["d"] * 4).prompts) == 4
    with pytest.raises(RequestError, match="'documents' makes prompts of 125 characters"):
        resolve("rerank", rules, model="toy", query=query, documents=["d"] * 5)
    with pytest.raises(RequestError, match="'text_2' makes prompts of 124 characters"):
        resolve("score", rules, model="toy", text_1=query, text_2=["d"] * 4, instruction="i" * 6)
    rules = rules_of(tokenizer, EMBEDDER, max_body_bytes=100)
    assert len(resolve("rerank", rules, model="toy", query=query, documents=["d"] * 5).prompts) == 6
