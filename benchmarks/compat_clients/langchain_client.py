"""LangChain over both of its integrations: invoke, stream, and a round with a tool."""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL, MODEL = os.environ["COMPAT_URL"], os.environ["COMPAT_MODEL"]


def get_weather(is_cold: bool) -> str:
    """The weather."""
    return "rain" if is_cold else "sun"


weather = tool(get_weather)


def use_model(model: Any) -> None:
    """Two turns and a round with a tool."""
    first = model.invoke("Tell me about the sea.")
    assert "".join(
        str(chunk.content) for chunk in model.stream([HumanMessage("Hello."), first, HumanMessage("Go on.")])
    )
    messages: list[Any] = [HumanMessage("What is the weather?")]
    answer = model.bind_tools([weather], tool_choice="any", strict=True).invoke(messages)
    (call,) = answer.tool_calls
    messages += [answer, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert model.bind_tools([weather]).invoke(messages).response_metadata


if __name__ == "__main__":
    use_model(ChatOpenAI(base_url=f"{URL}/v1", model=MODEL, max_tokens=512, temperature=0, max_retries=0))
    use_model(
        ChatOpenAI(
            base_url=f"{URL}/v1",
            model=MODEL,
            max_tokens=512,
            temperature=0,
            max_retries=0,
            use_responses_api=True,
            store=False,
        )
    )
    use_model(
        ChatAnthropic(
            base_url=URL,
            model_name=MODEL,
            max_tokens_to_sample=512,
            temperature=0,
            max_retries=0,
            timeout=600,
            stop=None,
        )
    )
