"""The names of formats in which models write calls of tools and thoughts: those of vLLM's parsers.

`services.gateway.parsing.families` has the formats. "none": what looks like a call or a thought is text.
"""

from __future__ import annotations

TOOL_CALL_PARSERS = (
    "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "openai", "gemma4", "functiongemma", "glm45",
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "deepseek_v41", "tiny",
)  # fmt: skip
REASONING_PARSERS = (
    "none",
    "qwen3",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "mistral",
    "gemma4",
    "openai_gptoss",
)
