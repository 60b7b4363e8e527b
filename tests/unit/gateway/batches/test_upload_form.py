"""Forms in any pieces, and what a file that looks like a boundary costs."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import RequestError
from services.gateway.batches.files.upload_form import MAX_HEAD_BYTES, UploadForm

PURPOSE = b'--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE_HEAD = b'--X\r\nContent-Disposition: form-data; name="file"; filename="in"\r\n\r\n'
# What files may hold, though it looks like an end of a part.
PIECES = st.sampled_from(
    [
        b"\r\n--X",
        b"\r\n--X-",
        b"\r\n--X\r",
        b"\r",
        b"\r\n",
        b"\n",
        b"\r\n\r\n--",
        b"--X--",
        b"-",
        b"X",
        b"text",
        b"\0",
    ]
)


def form_of(content: bytes) -> bytes:
    return PURPOSE + FILE_HEAD + content + b"\r\n--X--\r\n"


def parse(*pieces: bytes, boundary: str = "X") -> tuple[UploadForm, bytes]:
    form, content = UploadForm(f"multipart/form-data; boundary={boundary}"), b""
    for piece in pieces:
        form.feed(piece)
        content += b"".join(form.take_chunks())
    return form, content


@given(st.lists(PIECES, max_size=12).map(b"".join), st.lists(st.integers(1, 40), min_size=1, max_size=9))
def test_a_file_is_what_was_sent_however_it_is_cut(content: bytes, sizes: list[int]) -> None:
    if b"\r\n--X\r\n" in content + b"\r\n--X--" or b"\r\n--X--" in content:
        return
    text, pieces, number = form_of(content), list[bytes](), 0
    while text:
        size = sizes[number % len(sizes)]
        pieces, text, number = [*pieces, text[:size]], text[size:], number + 1
    form, found = parse(*pieces)
    assert found == content and form.finish() == ("in", None)


@pytest.mark.parametrize(
    "text",
    [
        b"no form at all",
        b"--Y\r\nContent-Disposition: form-data\r\n\r\n",
        PURPOSE + b"--X\r\n\r\nno head\r\n--X--\r\n",
        b"--X\r\n" + b"a: b\r\n" * 20 + b"\r\n",
        b"--X\r\na: " + b"b" * MAX_HEAD_BYTES,
        b"--X\r\na: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n",
        PURPOSE + PURPOSE,
    ],
)
def test_what_is_no_form_is_refused(text: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        form, _ = parse(text)
        form.finish()
    assert refused.value.failure.status == 400


def test_an_empty_file_and_a_preamble_of_line_ends() -> None:
    form, found = parse(b"\r\n" + form_of(b""))
    assert (found, form.finish()) == (b"", ("in", None))


def test_a_boundary_has_a_bound() -> None:
    with pytest.raises(RequestError, match="70"):
        UploadForm("multipart/form-data; boundary=" + "b" * 71)


@pytest.mark.parametrize("repeated", [b"\r\n--X_", b"\r\n--X-_", b"\r\n--X\r_", b"\r", b"\r\n\r\n--"])
def test_the_librarys_parser_sees_heads_alone(repeated: bytes) -> None:
    """Its speed depends on what is in the file: 3 MB/s for some, 1,400 MB/s for others."""
    content = repeated * (200_000 // len(repeated))
    text = form_of(content)
    form, found = parse(*(text[at : at + 65536] for at in range(0, len(text), 65536)))
    form.finish()
    assert found == content and form.parsed_bytes < 500


def test_a_file_of_boundaries_costs_as_much_as_any_other() -> None:
    def cost(unit: bytes) -> float:
        text = form_of(unit * ((8 << 20) // len(unit)))
        pieces = [text[at : at + 65536] for at in range(0, len(text), 65536)]
        begun_s = time.thread_time()
        form = UploadForm("multipart/form-data; boundary=X")
        for piece in pieces:
            form.feed(piece)
            form.take_chunks()
        return time.thread_time() - begun_s

    # The library alone takes hundreds of times as long; a busy machine several times.
    assert cost(b"\r\n--X_") < 40 * cost(b"plain text, ") + 0.05
