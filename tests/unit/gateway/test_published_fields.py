"""Every field that the published schemas, and what clients make of answers, have within items, blocks and tools."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from anthropic import types as messages
from anthropic.types import beta
from openai.types import chat, responses, shared_params
from openai.types.chat import parsed_chat_completion, parsed_function_tool_call
from openai.types.responses import parsed_response
from openai.types.responses import response_input_item_param as items
from pydantic import BaseModel

from services.gateway.openai.schemas import message_blocks, message_parts, messages_request, response_items
from services.gateway.openai.schemas.request_schema import FunctionTool, JsonSchema, Message, StreamOptions
from services.gateway.openai.schemas.responses_request import ResponseStreamOptions, TextOptions

PUBLISHED: list[tuple[Any, type[msgspec.Struct]]] = [
    (chat.ChatCompletionContentPartTextParam, message_parts.TextPart),
    (chat.ChatCompletionContentPartRefusalParam, message_parts.RefusalPart),
    (chat.ChatCompletionUserMessageParam, Message),
    (chat.ChatCompletionAssistantMessageParam, Message),
    (chat.ChatCompletionToolMessageParam, Message),
    (chat.ChatCompletionMessageFunctionToolCallParam, message_parts.PastFunctionCall),
    (chat.chat_completion_message_function_tool_call_param.Function, message_parts.PastFunction),
    (chat.ChatCompletionNamedToolChoiceParam, message_parts.NamedTool),
    (chat.ChatCompletionAllowedToolChoiceParam, message_parts.AllowedTools),
    (chat.ChatCompletionAllowedToolsParam, message_parts.AllowedList),
    (chat.ChatCompletionStreamOptionsParam, StreamOptions),
    (shared_params.FunctionDefinition, FunctionTool),
    (responses.EasyInputMessageParam, response_items.MessageInput),
    (items.Message, response_items.MessageInput),
    (responses.ResponseOutputMessageParam, response_items.MessageInput),
    (responses.ResponseInputTextParam, response_items.InputTextPart),
    (responses.ResponseOutputTextParam, response_items.AnswerTextPart),
    (responses.ResponseOutputRefusalParam, response_items.RefusedPart),
    (responses.response_reasoning_item_param.Summary, response_items.PlainTextPart),
    (responses.response_reasoning_item_param.Content, response_items.PlainTextPart),
    (responses.ResponseReasoningItemParam, response_items.ThoughtInput),
    (responses.ResponseFunctionToolCallParam, response_items.CallInput),
    (items.FunctionCallOutput, response_items.OutputInput),
    (responses.FunctionToolParam, response_items.ResponseFunction),
    (responses.ToolChoiceFunctionParam, response_items.FunctionChoice),
    (responses.ToolChoiceAllowedParam, response_items.AllowedChoice),
    (responses.ResponseFormatTextJSONSchemaConfigParam, response_items.SchemaFormat),
    (responses.ResponseTextConfigParam, TextOptions),
    (responses.response_create_params.StreamOptions, ResponseStreamOptions),
    (shared_params.response_format_json_schema.JSONSchema, JsonSchema),
    (messages.user_message_param.UserMessageParam, messages_request.InputMessage),
    (messages.assistant_message_param.AssistantMessageParam, messages_request.InputMessage),
    (messages.TextBlockParam, message_blocks.GivenText),
    (messages.ThinkingBlockParam, message_blocks.GivenThought),
    (messages.RedactedThinkingBlockParam, message_blocks.HiddenThought),
    (messages.ToolUseBlockParam, message_blocks.GivenCall),
    (messages.ToolResultBlockParam, message_blocks.GivenResult),
    (messages.ToolParam, message_blocks.ClientTool),
    (beta.BetaToolParam, message_blocks.ClientTool),
    (beta.beta_user_message_param.BetaUserMessageParam, messages_request.InputMessage),
    (beta.beta_system_message_param.BetaSystemMessageParam, messages_request.InputMessage),
    (beta.beta_assistant_message_param.BetaAssistantMessageParam, messages_request.InputMessage),
    (beta.BetaTextBlockParam, message_blocks.GivenText),
    (beta.BetaThinkingBlockParam, message_blocks.GivenThought),
    (beta.BetaToolUseBlockParam, message_blocks.GivenCall),
    (beta.BetaToolResultBlockParam, message_blocks.GivenResult),
    (beta.BetaCacheControlEphemeralParam, message_parts.CacheControl),
    (beta.BetaThinkingConfigEnabledParam, messages_request.ThinkingOptions),
    (beta.BetaThinkingConfigAdaptiveParam, messages_request.ThinkingOptions),
    (beta.BetaOutputConfigParam, messages_request.OutputOptions),
    (beta.BetaMetadataParam, messages_request.MessageMetadata),
    (messages.CacheControlEphemeralParam, message_parts.CacheControl),
    (parsed_chat_completion.ParsedChatCompletionMessage, Message),
    (parsed_function_tool_call.ParsedFunctionToolCall, message_parts.PastFunctionCall),
    (parsed_function_tool_call.ParsedFunction, message_parts.PastFunction),
    (parsed_response.ParsedResponseOutputText, response_items.AnswerTextPart),
    (parsed_response.ParsedResponseOutputMessage, response_items.MessageInput),
    (parsed_response.ParsedResponseFunctionToolCall, response_items.CallInput),
    (messages.ToolChoiceToolParam, messages_request.ToolPick),
    (messages.ThinkingConfigEnabledParam, messages_request.ThinkingOptions),
    (messages.OutputConfigParam, messages_request.OutputOptions),
    (messages.JSONOutputFormatParam, messages_request.MessageFormat),
    (messages.MetadataParam, messages_request.MessageMetadata),
]


# What nothing follows from may have fields that no schema lists.
OPEN = (message_parts.CacheControl,)


def published_fields(published: Any) -> set[str]:
    """The names of its fields in JSON: of a dictionary with types, or of a model of pydantic."""
    if issubclass(published, BaseModel):
        return {field.alias or name for name, field in published.model_fields.items()}
    return set(published.__annotations__)


@pytest.mark.parametrize(("published", "ours"), PUBLISHED, ids=lambda kind: str(kind.__name__))
def test_every_published_field_is_known(published: Any, ours: type[msgspec.Struct]) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(ours)} | {ours.__struct_config__.tag_field}
    assert published_fields(published) - known == set()
    assert ours.__struct_config__.forbid_unknown_fields is (ours not in OPEN)
