"""Lines of a batch, of many kinds."""

from __future__ import annotations

from typing import Any

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 11},
    {"temperature": 0.7, "top_p": 0.9, "seed": 5},
    {"temperature": 0, "stop": ["e", "zz"]},
    {"temperature": 0, "logprobs": 1, "echo": True},
)


def completion_lines(count: int, **fields: Any) -> dict[str, dict[str, Any]]:
    """Bodies by custom_id, of many kinds."""
    return {
        f"text-{number}": {
            "model": "tiny",
            "prompt": f"def f_{number}(x):" * (1 + number % 9),
            "max_tokens": 6,
        }
        | KINDS[number % len(KINDS)]
        | fields
        for number in range(count)
    }
