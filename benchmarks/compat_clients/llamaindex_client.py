"""LlamaIndex's client of OpenAI-like servers: chat, stream, completion, and a call of a tool."""

from __future__ import annotations

import os

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

URL, MODEL = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]


def get_weather(is_cold: bool) -> str:
    """The weather."""
    return "rain" if is_cold else "sun"


if __name__ == "__main__":
    model = OpenAILike(
        model=MODEL, api_base=f"{URL}/v1", api_key=os.environ["OPENAI_API_KEY"],
        max_tokens=512, max_retries=0, temperature=0,
        is_chat_model=True, is_function_calling_model=True, context_window=4096,
    )  # fmt: skip
    first = model.chat([ChatMessage(role="user", content="Tell me about the sea.")])
    history = [
        ChatMessage(role="user", content="Hello."),
        first.message,
        ChatMessage(role="user", content="Go on."),
    ]
    assert list(model.stream_chat(history))
    assert model.complete("The sea").text is not None
    tool = FunctionTool.from_defaults(get_weather)
    answer = model.chat_with_tools([tool], user_msg="What is the weather?", tool_required=True)
    assert len(model.get_tool_calls_from_response(answer)) == 1
