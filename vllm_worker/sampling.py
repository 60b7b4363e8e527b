"""Sampling parameters of ours as those of vLLM, in plain values; imports neither vLLM nor torch.

vLLM gets what is left of a request: tokens that were delivered already are part of its prompt, so limits are reduced by
them. What vLLM would then compute differently, because it does not know that they are output, is refused here: other
tokens are never generated instead (`router.requests.continuable` keeps such requests away).
"""

from __future__ import annotations

import json
from typing import Any

from diptych.request import Grammar, SamplingParams
from vllm_worker.port import PortFacts, PortRefused, PortRequest

# Whitespace between JSON tokens, as `engine.sampling.grammar` allows it, in the form that llguidance reads in a schema.
JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}}
# The key in `kv_transfer_params` under which the connector finds a request's key.
KEY_FIELD = "diptych_key"


def is_seeded(sampling: SamplingParams) -> bool:
    """Whether its client may expect the same noise again: it samples, and the client gave the seed."""
    return sampling.temperature > 0 and sampling.seeded


def build_sampling(request: PortRequest, facts: PortFacts, end_id: int | None) -> dict[str, Any]:
    """The arguments of `vllm.SamplingParams` for `request`, with "structured_outputs" as a dictionary.

    Its "bad_words" are texts, so those of the request, which are tokens, are to be set later.

    `end_id` is the token that ends a grammar's text: it stops requests with a grammar even if they ignore end tokens.

    Raises:
        PortRefused: vLLM cannot serve the request exactly; the code is "unsupported_parameter" or "invalid_grammar".
    """
    sampling, drafts = request.sampling, request.save and request.defer_first
    _check_exact(request, facts)
    left = max(1, sampling.max_tokens - len(request.output))
    max_tokens = 1 if request.save else left
    values: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": 0,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
        # It is made for this request alone.
        "skip_clone": True,
        "prompt_logprobs": None if request.output or request.load else sampling.prompt_logprobs,
        "extra_args": _transfer_arguments(request),
    }
    if drafts or sampling.max_tokens == 0:
        # The token is thrown away.
        return values
    stops = list(sampling.stop_token_ids)
    if sampling.grammar is not None:
        values["structured_outputs"] = build_grammar(sampling.grammar)
        if end_id is not None and end_id not in stops:
            stops.append(end_id)
    return values | {
        "min_tokens": min(max_tokens, max(0, sampling.min_tokens - len(request.output))),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "seed": sampling.seed if is_seeded(sampling) else None,
        "stop_token_ids": stops,
        "logprobs": sampling.logprobs,
    }


def _check_exact(request: PortRequest, facts: PortFacts) -> None:
    """Raises PortRefused if vLLM would give other tokens than the request is promised, or if it would end."""
    sampling, draws = request.sampling, not (request.save and request.defer_first)
    if sampling.thought is not None or (sampling.grammar is not None and sampling.grammar.gate is not None):
        what = "a budget of thoughts" if sampling.thought is not None else "a grammar of a part of the answer"
        why = "vLLM would apply it to other tokens; workers with Diptych's own engine serve it (docs/engines.md)"
        raise PortRefused("unsupported_parameter", f"{what} cannot be used here", why)
    if is_seeded(sampling) and draws and not facts.chunks_seeded:
        why = "vLLM's CPU build ends at a seeded request whose prompt is prefilled in parts"
        fix = "start the workers without --enable-chunked-prefill, or send no seed"
        raise PortRefused("unsupported_parameter", "a seed cannot be used here", f"{why}; {fix}")
    if not request.output:
        return
    lost = [
        name
        for name, needed in (
            ("a grammar", sampling.grammar is not None),
            (
                "a presence or frequency penalty",
                bool(sampling.presence_penalty or sampling.frequency_penalty),
            ),
            ("bad words of several tokens", any(len(word) > 1 for word in sampling.bad_words)),
            ("a seed", is_seeded(sampling) and not facts.seeds_by_position),
        )
        if needed
    ]
    if lost:
        raise PortRefused("internal_error", f"vLLM cannot continue a request with {' and '.join(lost)}")


def _transfer_arguments(request: PortRequest) -> dict[str, Any] | None:
    """What the connector has to know of a request; None if none of its KV comes or goes."""
    load = request.load
    if load is None and not request.save:
        return None
    params = {
        KEY_FIELD: request.key,
        "save": request.save,
        "load_slabs": [] if load is None else list(load.slabs),
        "load_tokens": 0 if load is None else load.num_tokens,
    }
    return {"kv_transfer_params": params}


def build_grammar(grammar: Grammar) -> dict[str, Any]:
    """The arguments of vLLM's `StructuredOutputsParams`, whose backend "guidance" then allows the texts that ours does.

    Raises:
        PortRefused: the kind is unknown, or the schema is no JSON object ("invalid_grammar").
    """
    if grammar.kind == "json_object":
        return {"json": json.dumps({"type": "object"} | JSON_OPTIONS)}
    if grammar.kind == "json_schema":
        try:
            schema = json.loads(grammar.text)
        except (ValueError, RecursionError) as error:
            raise PortRefused("invalid_grammar", "the JSON schema is not valid JSON", str(error)) from error
        if not isinstance(schema, dict):
            raise PortRefused("invalid_grammar", "the JSON schema is not an object")
        return {"json": json.dumps(schema | JSON_OPTIONS)}
    if grammar.kind == "regex":
        return {"regex": grammar.text}
    if grammar.kind == "choice":
        return {"choice": json.loads(grammar.text)}
    if grammar.kind == "lark":
        return {"grammar": grammar.text}
    raise PortRefused("invalid_grammar", f"there is no grammar of kind {grammar.kind!r}")
