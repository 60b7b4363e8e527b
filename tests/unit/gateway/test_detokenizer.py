"""Incremental decoding and stop strings: the same text however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.gateway.tokenization.detokenizer import (
    WINDOW_TOKENS,
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from services.gateway.tokenization.stop_strings import StopStrings
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import TEXT

Decode = Callable[[list[int]], str]


def ids_of(tokenizer: Tokenizer, pieces: Iterable[str]) -> list[int]:
    ids = [tokenizer.token_to_id(piece) for piece in pieces]
    assert None not in ids
    return [token for token in ids if token is not None]


def spelled(detokeniser: Detokenizer, ids: Iterable[int]) -> list[str]:
    return [*(detokeniser.feed(token) for token in ids), detokeniser.flush()]


@pytest.fixture(scope="session")
def pieces() -> Tokenizer:
    """A SentencePiece-like vocabulary: word pieces with a leading blank, and one token per byte for the rest."""
    words = ["<unk>", "▁", "▁the", "▁fox", "s", "er", "▁w", "ö", "e", "l", "f"]
    vocabulary = {piece: i for i, piece in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def both(tokens: GatewayTokenizer, skip_special: bool = True) -> list[Detokenizer]:
    """What the model's vocabulary gets, and what one that is not byte-level gets."""
    fast = tokens.new_detokenizer(skip_special)
    assert isinstance(fast, ByteDetokenizer)
    return [fast, WindowDetokenizer(lambda ids: tokens.decode(ids, skip_special))]


@given(st.lists(st.integers(0, 330), max_size=200), st.booleans())
def test_any_tokens_spell_what_decoding_them_at_once_gives(
    tokens: GatewayTokenizer, ids: list[int], skip_special: bool
) -> None:
    for detokeniser in both(tokens, skip_special):
        assert "".join(spelled(detokeniser, ids)) == tokens.decode(ids, skip_special)


@given(st.text(max_size=120))
@example("<|end|>")  # the name of a special token is one
def test_any_text_is_spelled_without_unfinished_characters(tokens: GatewayTokenizer, text: str) -> None:
    for detokeniser in both(tokens, skip_special=False):
        shown = spelled(detokeniser, tokens.encode(text, False))
        assert "".join(shown) == text
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in shown)


def test_characters_come_as_soon_as_their_last_byte(tokens: GatewayTokenizer) -> None:
    ids = [token for symbol in "aé€😀" for token in tokens.encode(symbol, False)]
    for detokeniser in both(tokens):
        pieces = [detokeniser.feed(token) for token in ids]
        assert "".join(pieces) == "aé€😀" and detokeniser.flush() == ""
        assert [piece for piece in pieces if piece] == ["a", "é", "€", "😀"]


visible = st.characters(codec="utf-8", min_codepoint=33, exclude_characters="\ufffd▁")


@given(st.text(alphabet=visible, min_size=1, max_size=80))
def test_byte_fallback_characters_arrive_whole(pieces: Tokenizer, text: str) -> None:
    ids = ids_of(pieces, (f"<0x{byte:02X}>" for byte in text.encode()))
    shown = spelled(WindowDetokenizer(pieces.decode), ids)
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


def test_blanks_of_sentencepiece_survive_a_moved_window(pieces: Tokenizer) -> None:
    ids = ids_of(pieces, ("▁the", "▁fox", "e", "s", "▁w", "ö", "l", "f", "▁")) * 30
    assert "".join(spelled(WindowDetokenizer(pieces.decode), ids)) == pieces.decode(ids)


def test_bytes_that_are_no_character_are_not_held_for_ever(tokens: GatewayTokenizer) -> None:
    (stray,) = ids_of(tokens.backend, "¬")  # byte 0xAC, which only continues characters
    for detokeniser in both(tokens):
        shown = "".join(detokeniser.feed(stray) for _ in range(100))
        assert len(shown) >= 97


def test_the_cost_of_a_token_does_not_grow_with_the_answer(tokens: GatewayTokenizer) -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokens.decode(ids)

    spelled(WindowDetokenizer(decode), tokens.encode(TEXT * 20, False))
    assert longest <= WINDOW_TOKENS + 3


# ---- stop strings


def stopped(stops: list[str], pieces: Iterable[str], keep: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, keep)
    shown = "".join([matcher.feed(piece) for piece in pieces])
    return shown + matcher.flush(), matcher.hit


def first_end(stops: list[str], text: str) -> tuple[int, int, str] | None:
    """The oracle: cut `text` after every character and look whether it ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), end, longest
    return None


letters = st.text(alphabet="abc", max_size=30)


@given(
    letters, st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4), st.randoms()
)
def test_the_first_stop_string_is_found_however_the_text_is_cut(
    text: str, stops: list[str], random: object
) -> None:
    cuts = sorted(random.sample(range(len(text) + 1), random.randint(0, len(text))))  # type: ignore[attr-defined]
    bounds = [0, *cuts, len(text)]
    shown, hit = stopped(stops, [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)])
    expected = first_end(stops, text)
    assert (shown, hit) == ((text, None) if expected is None else (text[: expected[0]], expected[2]))


@given(letters, st.text(alphabet="abc", min_size=1, max_size=4))
def test_a_kept_stop_string_ends_the_text(text: str, stop: str) -> None:
    shown, hit = stopped([stop], text, keep=True)
    assert shown == (text[: text.index(stop) + len(stop)] if stop in text else text)
    assert (hit is not None) == (stop in text)


def test_no_part_of_a_stop_string_gets_out() -> None:
    matcher = StopStrings(["</answer>"])
    assert [matcher.feed(piece) for piece in ("42</an", "swe", "r>more")] == ["42", "", ""]
    assert matcher.hit == "</answer>"
    assert matcher.feed("again") == ""


def test_what_only_looked_like_a_stop_string_is_not_lost() -> None:
    matcher = StopStrings(["</answer>"])
    assert [matcher.feed(piece) for piece in ("42</an", "d>", "x")] == ["42", "</and>", "x"]


def test_text_before_min_tokens_is_not_examined() -> None:
    matcher = StopStrings(["ab"])
    assert matcher.skip("xab") == "xab"
    assert matcher.skip("a") == "a"
    assert matcher.feed("b") == "b"
    assert matcher.hit is None
