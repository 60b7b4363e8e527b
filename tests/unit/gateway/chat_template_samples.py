"""Chat templates of our own in the styles that models bring, and conversations to render with them."""

from __future__ import annotations

from typing import Any

# ChatML: a system message may come first or later, tool results are user turns, other roles are passed over.
CHATML = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set tool_call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# The same with reasoning: kept for the turns behind the last question, cut from the others.
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == 'user' %}{% set ns.last = index %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and reasoning and (enable_thinking is not defined or enable_thinking) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""

# Headers around any role; content is stripped; the day is named.
HEADERS = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{{- "<|start|>system<|stop|>\\n\\nToday: " + date_string + "\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("one tool call at once") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|stop|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson(indent=2) }}
        {{- "}<|eot|>" }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|stop|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|stop|>\\n\\n' }}
{%- endif %}
"""

# User and assistant take turns; the system message goes into the last question; answers are marked for training.
STRICT = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system_message = messages[0]['content'] -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{{ bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}
        {{- ' ' + message['content'] | trim + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- raise_exception('only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}
"""

# Blocks on lines of their own, loop controls, macros, and what else templates rarely use.
ODD = """\
{% macro line(message, index) %}
{{ index }}. {{ message.role | upper }}: {{ (message.content or message.tool_calls) | tojson }}
{% endmacro %}
{% for message in messages %}
  {% if message.role == 'tool' %}
    {% continue %}
  {% endif %}
{{ line(message, loop.index) }}
{% endfor %}
{% for number in range(9) %}
  {% if number > 2 %}
    {% break %}
  {% endif %}
{{ number }}
{% endfor %}
{{ dict(a=1, b='<ü>') | tojson(sort_keys=true, separators=(',', ':')) }}
{{ messages | map(attribute='role') | join(', ') }} {{ tools is none }} {{ unknown is defined }}{{ pad_token }}
"""

TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "headers": HEADERS, "strict": STRICT, "odd": ODD}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call12345", "type": "function", "function": {"name": "look_up", "arguments": arguments}}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "Who <are> you?"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi 👋\n"}],
    "turns": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "  <think>\nhm\n</think>\n\ntwo \n"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four  "},
    ],
    "reasoning": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "because"},
    ],
    "older reasoning": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning": "because", "name": None},
    ],
    "tools": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call({"größe": [1, None, True], "q": "a<b"})]},
        {"role": "tool", "content": "found", "tool_call_id": "call12345"},
        {"role": "assistant", "content": "done"},
    ],
    "two calls": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [call({}), call("not JSON")]},
    ],
    "late system": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
    "developer": [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "a"}],
    "empty": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "blank": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "   "}],
    "mark": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "CONTINUE_FINAL_MESSAGE_TAG "},
    ],
}
