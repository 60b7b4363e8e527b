"""The request field `diptych.keep`: how much of its KV a request keeps, and in which KV class
(`diptych.eviction_spec`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from diptych.chunks import AUTO_CLASS, CHUNK_TOKENS, RAW_CLASS
from diptych.eviction_report import KeptReport
from diptych.eviction_spec import ADA, KEEP_ALL, KEEP_RULES, ZAP, KeepSpec
from diptych.logs.shown_text import quote_text
from router.workers.kv_classes import ServedClasses, names_class
from services.gateway.openai.schemas.request_schema import GenerationFields, KeepOptions
from services.gateway.openai.schemas.response_schema import KeepDetails, KvDetails
from services.gateway.openai.validate import RequestRules, invalid_value_error, unsupported_error

KEEP_FIELD = "diptych.keep"
BOUNDARY_FIELD, RULE_FIELD = f"{KEEP_FIELD}.boundary", f"{KEEP_FIELD}.rule"
# Roles of messages that instruct the model, and with which a conversation begins.
SYSTEM_ROLES = ("system", "developer")


def resolve_keep(
    fields: GenerationFields, lengths: Collection[int], system_tokens: int, rules: RequestRules
) -> KeepSpec:
    """What a request keeps of its KV. A boundary is a number of whole chunks; others are refused, not rounded.

    Args:
        fields: the request.
        lengths: the tokens of each prompt.
        system_tokens: tokens up to the end of the system message, which give the boundary if the request does not.
        rules: its `keep_threshold` counts for requests without one.

    Raises:
        RequestError: 400, the rule is unknown; the boundary is not a number of whole chunks, or beyond a prompt; or a
            boundary or a rule is without a threshold though the default keeps everything.
    """
    asked = None if fields.diptych is None else fields.diptych.keep
    options = asked if isinstance(asked, KeepOptions) else KeepOptions(asked)
    if options.rule is not None and options.rule not in KEEP_RULES:
        known = ", ".join(f"'{rule}'" for rule in KEEP_RULES)
        raise invalid_value_error(RULE_FIELD, f"{quote_text(options.rule)} is not one of {known}")
    threshold = rules.keep_threshold if options.threshold is None else options.threshold
    boundary = options.boundary
    for field, value in ((BOUNDARY_FIELD, boundary), (RULE_FIELD, options.rule)):
        if value is not None and options.threshold is None and threshold >= 1:
            problem = "needs a threshold below 1; the default is 1"
            raise invalid_value_error(field, f"{problem}. Send 'diptych.keep.threshold', too")
    if boundary is None:
        boundary = system_tokens - system_tokens % CHUNK_TOKENS
    elif boundary % CHUNK_TOKENS:
        below = boundary - boundary % CHUNK_TOKENS
        problem = f"({boundary}) is not a number of whole chunks of {CHUNK_TOKENS} tokens"
        raise invalid_value_error(BOUNDARY_FIELD, f"{problem}; send {below} or {below + CHUNK_TOKENS}")
    elif boundary > (shortest := min(lengths)):
        problem = f"({boundary} tokens) is beyond the prompt, which has {shortest} tokens"
        raise invalid_value_error(BOUNDARY_FIELD, problem)
    return KeepSpec(threshold, boundary, options.rule or ADA) if threshold < 1 else KEEP_ALL


def find_asked_rule(fields: GenerationFields) -> str | None:
    """The rule that a request names, if any."""
    asked = None if fields.diptych is None else fields.diptych.keep
    return asked.rule if isinstance(asked, KeepOptions) else None


def choose_keep_rule(asked: str | None, rules: Sequence[str]) -> str:
    """The rule of a request that evicts: what it asks for; or `zap` where there are weights for it, else `ada`.

    Args:
        asked: the rule that the request names, if any.
        rules: by which the workers can evict.

    Raises:
        RequestError: 400, it asks for `zap`, and the workers have no weights for it, or different ones.
    """
    calibrated = next((rule for rule in rules if rule.startswith(ZAP)), None)
    if asked == ZAP and calibrated is None:
        problem = "cannot be 'zap': the workers have no calibration of evictions (diptych calibrate), or different ones"
        raise unsupported_error(RULE_FIELD, f"{problem}; send 'ada' or 'fastgen'")
    return calibrated or ADA if asked in (None, ZAP) else asked


def choose_keep_class(asked: str | None, classes: ServedClasses) -> str:
    """The KV class of a request that evicts: what it asks for, or the class of requests that ask for none.

    While no worker is up it is `asked`, or `RAW_CLASS`: the request waits, or fails, like any other one.

    Args:
        asked: the class that the request names, if any (`router.workers.kv_classes.names_class`).
        classes: what the workers have.

    Raises:
        RequestError: 400, workers cannot evict in the class.
    """
    if not classes.served:
        return asked or RAW_CLASS
    wanted = asked or classes.default
    fitting = [name for name in classes.keep if wanted is None or names_class(wanted, name)]
    if fitting and wanted != AUTO_CLASS:
        return asked or fitting[0]
    able = " and ".join(classes.keep)
    if wanted == AUTO_CLASS and able:
        problem = f"needs a KV class that does not change; send 'diptych': {{'kv': '{classes.keep[0]}'}}"
    elif able:
        problem = f"is not possible for KV of the class '{wanted}'; the workers can evict KV of {able}"
    else:
        served = " and ".join(classes.served)
        problem = f"is not possible: the workers have KV of {served}, and can evict none of it yet"
    raise unsupported_error(KEEP_FIELD, f"below 1 {problem}{_explain_limits(classes)}")


def _explain_limits(classes: ServedClasses) -> str:
    """What cannot be evicted yet, as the end of a sentence; empty if it is the choice of class alone."""
    if classes.served == [RAW_CLASS] and classes.keep:
        return ""
    return "; workers on GPUs keep everything (docs/eviction.md)"


def find_system_end(messages: Sequence[Mapping[str, Any]], text: str) -> int:
    """Where the system messages that begin a conversation end in its rendered prompt, in characters.

    It is 0 without such a message, and if the chat template changed it or put it behind other messages.
    """
    end = 0
    for number, message in enumerate(messages):
        content = (message["content"] or "").strip()
        if message["role"] not in SYSTEM_ROLES:
            first = (messages[0]["content"] or "").strip()
            return 0 if number and content and content in text[: text.find(first)] else end
        found = text.find(content, end)
        if found < 0:
            return 0
        end = found + len(content)
    return end


def count_shared_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two lists share at their beginning."""
    both = zip(left, right, strict=False)
    return next((at for at, (one, other) in enumerate(both) if one != other), min(len(left), len(right)))


def describe_kv(
    details: KvDetails | None, keep: KeepSpec, reports: Iterable[KeptReport | None]
) -> KvDetails | None:
    """What an answer tells of its KV: `details`, with what its sequences kept if they evict, added up.

    Nothing was decided yet for a sequence without a report.
    """
    if details is None or not keep.evicts:
        return details
    found, heads = [one for one in reports if one is not None], Counter[str]()
    for one in found:
        heads.update(one.policies)
    kept = KeepDetails(
        keep.threshold,
        keep.boundary,
        keep.rule,
        sum(one.kept_rows for one in found),
        sum(one.all_rows for one in found),
        sum(one.freed_slabs for one in found) * details.kv_bytes_per_token * CHUNK_TOKENS,
        dict(heads),
    )
    return msgspec.structs.replace(details, keep=kept)
