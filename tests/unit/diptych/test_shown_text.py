"""Text of others, as it is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.logs.shown_text import CUT_MARK, escape_text, quote_text, shorten_text

HUGE = 8 << 20


class CountedText(str):
    """A text that counts the characters that are looked at through it."""

    __slots__ = ("seen",)

    def __getitem__(self, key: object) -> str:
        assert isinstance(key, slice)
        found = str(self)[key]
        self.seen = len(found)
        return found

    def isprintable(self) -> bool:
        raise AssertionError("the whole text is walked")

    def __iter__(self):  # type: ignore[no-untyped-def]
        raise AssertionError("the whole text is walked")


@given(st.text(st.characters()), st.integers(1, 60))
def test_a_shown_text_is_short_and_printable(text: str, most: int) -> None:
    shown = shorten_text(text, most)
    assert len(shown) <= most
    assert shown.isprintable()
    assert shorten_text(shown, most) == shown
    shown.encode()


@pytest.mark.parametrize("text", ["", "plain", "naïve 文字 😀", 'it\'s "quoted"'])
def test_a_plain_text_is_unchanged(text: str) -> None:
    assert shorten_text(text, 40) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("a\r\n2026-01-31 WARNING gateway", r"a\r\n2026-01-31 WARNING gateway"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\u202eevil\u2028", r"\u202eevil\u2028"),
        ("\ud800", r"\ud800"),
        ("\x85\x9b", r"\x85\x9b"),
    ],
)
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert shorten_text(text, 60) == escape_text(text) == shown


def test_a_text_that_is_cut_says_so() -> None:
    assert shorten_text("k" * 50, 10) == "k" * 9 + CUT_MARK
    assert shorten_text("\n" * 50, 10) == r"\n\n\n\n" + "\\" + CUT_MARK
    assert quote_text("k" * 500) == f"'{'k' * 99}{CUT_MARK}'"


def test_only_the_part_that_is_shown_is_looked_at() -> None:
    text = CountedText("\n" * HUGE)
    assert len(shorten_text(text, 500)) == 500
    assert text.seen <= 501
