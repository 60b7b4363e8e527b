"""Answers of requests whose heads drop KV, over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.deployment import Served

# Past the first two decision points of the answer.
NEW_TOKENS, CONTEXT, SLOTS = 140, 1024, 6 * 4


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A greedy answer, what it tells of its KV, and how many tokens of its prompt were cached."""

    tokens: list[str]
    kv: dict[str, Any] | None
    fingerprint: str
    cached: int

    @property
    def keep(self) -> dict[str, Any]:
        assert self.kv is not None
        found: dict[str, Any] = self.kv["keep"]
        return found


def complete(
    served: Served, prompt: list[int], keep: Any, num_tokens: int = NEW_TOKENS, **options: Any
) -> KeptAnswer:
    """`options` are of the field `diptych`."""
    options["keep"] = keep
    with served.client(timeout=300) as client:
        done = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=num_tokens, temperature=0, logprobs=0,
            extra_body={"ignore_eos": True, "skip_special_tokens": False, "diptych": options},
        )  # fmt: skip
    logprobs, usage = done.choices[0].logprobs, done.usage
    assert logprobs is not None and logprobs.tokens is not None and usage is not None
    details = usage.prompt_tokens_details
    assert details is not None
    kv = (usage.model_extra or {}).get("diptych")
    return KeptAnswer(list(logprobs.tokens), kv, str(done.system_fingerprint), details.cached_tokens or 0)
