"""Text for calibration: what is measured on was never calibrated on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from models import data
from models.calibration import calibration_modules
from services.cli.calibrate.text import DOCUMENT_CHARS, SplitText, read_documents, split_text


def encode(text: str) -> list[int]:
    """One token per word: its number."""
    return [int(word) for word in text.split()]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def numbers(first: int, count: int) -> str:
    return " ".join(map(str, range(first, first + count)))


def documents_of(split: list[list[int]], length: int) -> set[int]:
    return {token // length for ids in split for token in ids if token >= 0}


@pytest.mark.parametrize("samples", [(1, 10), (3, 7), (2, 25)])
def test_no_document_is_calibrated_on_and_measured_on(tmp_path: Path, samples: tuple[int, int]) -> None:
    """Documents come twice, so a copy could be on the other side."""
    path = write_jsonl(
        tmp_path / "text.jsonl", [numbers(10 * i, 10) for i in [*range(8)] * 2 + [*range(8, 20)]]
    )
    split = split_text(path, encode, [-1], samples, (4, 6))
    assert len(split.sequences) == samples[0] and all(len(ids) == samples[1] for ids in split.sequences)
    assert len(split.held_out) == 4 and all(len(ids) == 6 and ids[0] == -1 for ids in split.held_out)
    assert documents_of(split.sequences, 10) and not (
        documents_of(split.sequences, 10) & documents_of(split.held_out, 10)
    )
    tokens = [token for ids in split.sequences + split.held_out for token in ids[1:]]
    assert len(tokens) == len(set(tokens))


def test_held_out_modules_are_not_among_the_embedded_model_s_calibration_text() -> None:
    modules = calibration_modules()
    assert len(modules) > 100 and not {module.name for module in modules} & data.HELD_OUT
    assert {module.name for module in data.split_held_out(data.read_modules())[1]} <= data.HELD_OUT


def test_plain_text_is_cut_at_line_ends(tmp_path: Path) -> None:
    path, line = tmp_path / "text.txt", "word " * 200 + "\n"
    path.write_text(line * 100)
    parts = list(read_documents(path))
    assert "".join(parts) == line * 100 and len(parts) > 4
    assert all(part.endswith("\n") and len(part) < DOCUMENT_CHARS + len(line) for part in parts)


def test_no_more_is_read_than_is_needed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "text.jsonl", [numbers(0, 50), numbers(50, 50)])
    with path.open("a") as file:
        file.write("this is no JSON\n")
    assert split_text(path, encode, [], (1, 50), (1, 20)) == SplitText([[*range(50)]], [[*range(50, 70)]])
    with pytest.raises(ConfigError, match="line 3 of --text"):
        split_text(path, encode, [], (1, 50), (3, 50))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": 1}\n', "line 1 of --text"),
        ("a.jsonl", b"[" * 100_000, "line 1 of --text"),
        ("a.jsonl", b'\n{"txt": "1 2 3"}\n', "line 2 of --text"),
        ("a.txt", b"1 2 \xff", "is not text in UTF-8"),
        ("a.txt", b"1 2 3", "has too little text"),
        ("a.txt", b"", "has too little text"),
        ("absent.txt", None, "cannot be read"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_in_few_lines(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        split_text(path, encode, [], (2, 8), (1, 8))
    assert said in caught.value.lines()[0] and len(caught.value.lines()) <= 6
