"""Sampling defaults of a model's generation_config.json: only where a request sets nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych.config.options import Config
from diptych.errors import ModelError
from diptych.request import SamplingParams
from diptych.specs import GatewaySpec
from services.cli.serve.specs import gateway_spec
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.sampling_defaults import SamplingDefaults
from services.gateway.openai.validate import RequestRules
from services.gateway.process_parts import load_sampling_defaults
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from services.host.model_probe import ProbedModel
from tests.unit.gateway.resolved_bodies import chat, completion

VALUES = {
    "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05, "max_new_tokens": 12,
}  # fmt: skip
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TINY = Path(__file__).parents[3] / "models" / "tiny"


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "eos_token_id": 3, **values})
    )
    return folder


def rules_with(tokens: GatewayTokenizer, **values: Any) -> RequestRules:
    return RequestRules(tokens, ("toy",), tokens.context_tokens, RequestLimits(), SamplingDefaults(**values))


def test_the_file_s_values_hold_where_a_request_sets_none(tokens: GatewayTokenizer, tmp_path: Path) -> None:
    defaults = SamplingDefaults.load(write(tmp_path, **VALUES))
    assert msgspec.structs.asdict(defaults) == VALUES
    rules = rules_with(tokens, **VALUES)
    for ask in (chat(rules), chat(rules, temperature=None, top_k=None), completion(rules)):
        assert {name: getattr(ask.sampling, name) for name in SAMPLED} == {
            name: VALUES[name] for name in SAMPLED
        }
        assert ask.sampling.max_tokens == 12


@pytest.mark.parametrize("route", [chat, completion])
def test_what_a_request_sets_counts(route: Any, tokens: GatewayTokenizer) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 40,
    }
    sampling = route(rules_with(tokens, **VALUES), seed=1, **asked).sampling
    assert sampling == SamplingParams(seed=1, stop_token_ids=sampling.stop_token_ids, **asked)


def test_longer_defaults_do_not_lengthen_a_completion(tokens: GatewayTokenizer) -> None:
    assert completion(rules_with(tokens, max_new_tokens=200)).sampling.max_tokens == 16
    assert chat(rules_with(tokens, max_new_tokens=200)).sampling.max_tokens == 200
    assert chat(rules_with(tokens, max_new_tokens=9_999)).sampling.max_tokens == tokens.context_tokens - 10


def test_a_switched_off_top_k_is_off(tokens: GatewayTokenizer) -> None:
    assert chat(rules_with(tokens, top_k=-1)).sampling.top_k == 0


def test_the_embedded_model_has_no_sampling_defaults() -> None:
    assert SamplingDefaults.load(TINY) == SamplingDefaults()


def test_no_file_sets_nothing(tmp_path: Path) -> None:
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults()
    assert SamplingDefaults.load(write(tmp_path, temperature=None)) == SamplingDefaults()


@pytest.mark.parametrize(
    "values",
    [{"temperature": -1}, {"top_p": 1.5}, {"top_k": "20"}, {"repetition_penalty": 0}, {"max_new_tokens": 0}],
)
def test_values_that_no_request_could_have_are_refused_at_start(
    values: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        SamplingDefaults.load(write(tmp_path, **values))
    assert next(iter(values)) in caught.value.why and "--generation-config none" in caught.value.fix


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ModelError):
        SamplingDefaults.load(tmp_path)


def spec_of(folder: Path, generation_config: str) -> GatewaySpec:
    config = Config(model=str(folder), generation_config=generation_config)
    return gateway_spec(config, ProbedModel(str(folder), "", True, 256, 0), "tcp://x", "keys", 0, ())


def test_the_setting_says_whose_file_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    write(model, temperature=0.6)
    write(other, top_k=7)
    monkeypatch.chdir(tmp_path)
    for given in ("model", "auto"):
        assert load_sampling_defaults(spec_of(model, given)) == SamplingDefaults(temperature=0.6)
    assert "temperature 0.6" in caplog.text
    assert load_sampling_defaults(spec_of(model, "other")) == SamplingDefaults(top_k=7)
    caplog.clear()
    assert load_sampling_defaults(spec_of(model, "none")) == SamplingDefaults()
    assert not caplog.text
    with pytest.raises(ModelError, match=r"no generation_config\.json"):
        load_sampling_defaults(spec_of(model, "elsewhere"))
