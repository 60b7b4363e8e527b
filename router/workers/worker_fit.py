"""Says from a worker's introduction why it cannot serve with its gateway (pure)."""

from __future__ import annotations

from diptych.chunks import AUTO_CLASS
from diptych.messages import Hello
from diptych.request import CONTINUED
from router.workers.kv_classes import classes_of


def find_misfit(hello: Hello, tokenizer: str = "", kv_keep: float = 1.0) -> str | None:
    """What differs between a worker and its gateway, with both sides named and what to do; None if the worker fits.

    Args:
        hello: the worker's introduction.
        tokenizer: fingerprint of the gateway's; "": any will do.
        kv_keep: threshold of requests that give none. Below 1 they all evict, in the class of requests that name none.
    """
    theirs = hello.identity.get("tokenizer", tokenizer)
    if tokenizer and theirs != tokenizer:
        return f"its tokenizer is {theirs}, and the gateway's is {tokenizer}: start both with the same model"
    if hello.keep_classes and not set(CONTINUED).issubset(hello.traits):
        lacks = " and ".join(trait for trait in CONTINUED if trait not in hello.traits)
        return f"it evicts KV, but cannot continue {lacks} exactly: only workers that do both may evict"
    default = AUTO_CLASS if hello.kv_auto else next(iter(classes_of(hello)))
    if kv_keep < 1 and default not in hello.keep_classes:
        able = " and ".join(hello.keep_classes) or "none"
        return (
            f"it gives requests KV of the class {default} and can evict {able}, and the gateway evicts that of all"
            f" requests (--kv-keep {kv_keep:g}): start a worker that can (docs/eviction.md), or the gateway without"
            " --kv-keep"
        )
    return None
