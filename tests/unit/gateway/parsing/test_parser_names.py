"""The settings take the names of the formats that there are."""

from __future__ import annotations

from diptych.config.answer_parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from services.gateway.parsing.families import REASONING, TOOL_CALLS


def test_settings_take_every_format_and_none() -> None:
    assert set(TOOL_CALL_PARSERS) == {"none", *TOOL_CALLS}
    assert set(REASONING_PARSERS) == {"none", *REASONING}
