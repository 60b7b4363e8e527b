"""Text for calibration, from a file: sequences to calibrate on, and windows that calibration never sees.

Documents are read in order until there is enough. Calibration takes whole documents from the beginning, measurement
begins with the next one, and a document that came before is skipped: so no held-out document is calibrated on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from diptych.errors import ConfigError

# Plain text is cut at line ends into documents of about this many characters.
DOCUMENT_CHARS = 16 << 10
# Most characters of a line that are read; what goes on after that counts as the next line.
MAX_LINE_CHARS = 4 << 20

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class SplitText:
    """Token ids: sequences for calibration, and windows that it does not see."""

    sequences: list[list[int]]
    held_out: list[list[int]]


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a text file, or the field `text` of each line of a .jsonl file.

    Raises:
        ConfigError: the file cannot be read, or a line of it is not as it must be.
    """
    try:
        with path.open(encoding="utf-8") as file:
            lines = iter(lambda: file.readline(MAX_LINE_CHARS), "")
            yield from _json_texts(path, lines) if path.suffix == ".jsonl" else _join_lines(lines)
    except OSError as error:
        raise ConfigError(f"--text {path} cannot be read", error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path} is not text in UTF-8", error.reason) from error


def _join_lines(lines: Iterator[str]) -> Iterator[str]:
    part, chars = list[str](), 0
    for line in lines:
        part.append(line)
        chars += len(line)
        if chars >= DOCUMENT_CHARS:
            yield "".join(part)
            part, chars = [], 0
    if part:
        yield "".join(part)


def _json_texts(path: Path, lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        text = found.get("text") if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise ConfigError(
                f"line {number} of --text {path} has no text",
                "each line of a .jsonl file is a JSON object with a string `text`",
                'for example {"text": "One document."}',
            )
        yield text


def split_text(
    path: Path, encode: Encode, prefix: list[int], samples: tuple[int, int], windows: tuple[int, int]
) -> SplitText:
    """Sequences and held-out windows from a file.

    Args:
        path: of the file.
        encode: text to token ids, without the tokens that begin a sequence.
        prefix: the tokens that begin every sequence of this model, for example one for its beginning.
        samples: number of sequences, and tokens of each.
        windows: number of held-out windows, and tokens of each; (0, 0) for none.

    Raises:
        ConfigError: the file cannot be read, or has too little text.
    """
    documents = _encode_new(read_documents(path), encode)
    sequences = _take_sequences(documents, prefix, *samples)
    held_out = _take_sequences(documents, prefix, *windows)
    found, wanted = len(sequences) + len(held_out), samples[0] + windows[0]
    if found < wanted:
        raise ConfigError(
            f"--text {path} has too little text",
            f"it takes {samples[0]} sequences of {samples[1]} tokens to calibrate, and {windows[0]} windows of "
            f"{windows[1]} from documents after them to measure; there are {found} of {wanted}",
            "give more text, or fewer --samples, --tokens or --windows; --no-quality needs no windows",
        )
    return SplitText(sequences, held_out)


def _encode_new(documents: Iterator[str], encode: Encode) -> Iterator[list[int]]:
    """The token ids of each document that did not come before."""
    seen = set[int]()
    for document in documents:
        if (key := hash(document)) not in seen:
            seen.add(key)
            yield encode(document)


def _take_sequences(
    documents: Iterator[list[int]], prefix: list[int], count: int, tokens: int
) -> list[list[int]]:
    """At most `count` sequences of documents in a row; what is left of the last document is not used."""
    content = tokens - len(prefix)
    stream = list[int]()
    while len(stream) < count * content and (ids := next(documents, None)) is not None:
        stream += ids
    starts = range(0, min(count, len(stream) // content if content > 0 else 0) * content, max(1, content))
    return [[*prefix, *stream[start : start + content]] for start in starts]
