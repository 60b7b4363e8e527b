"""The corpus and the synthetic documents: what is held out stays out, and a seed means one thing."""

import random
from pathlib import Path

import pytest

from models import data, recall
from models.tokenizer import load_tokenizer

TINY = Path(__file__).parents[3] / "models" / "tiny"


@pytest.fixture(scope="module")
def encode() -> recall.Encode:
    tokenizer = load_tokenizer(TINY)
    return lambda text: tokenizer.encode(text).ids


def filler(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(300, 4096) for _ in range(tokens)]


def test_held_out_modules_are_in_neither_sources_nor_docstrings() -> None:
    training, held_out = data.split_held_out(data.read_modules())
    assert {module.name for module in held_out} == data.HELD_OUT
    assert not {module.name for module in training} & data.HELD_OUT
    answers = {exchange.assistant for exchange in data.chat_exchanges(training)}
    for module in held_out:
        for name, text in data.module_docstrings(module):
            if len(text) > 200:
                assert data.shorten_answer(text) not in answers, name


def test_the_same_folder_gives_the_same_modules_and_chats() -> None:
    modules = data.read_modules()
    assert modules == data.read_modules()
    assert [module.name for module in modules] == sorted(module.name for module in modules)
    some = [module for module in modules if module.name in ("abc.py", "bisect.py")]
    assert data.chat_exchanges(some) == data.chat_exchanges(some) != []


def test_packages_installed_beside_the_library_are_not_read() -> None:
    for name in (
        "site-packages/torch/__init__.py",
        "test/test_os.py",
        "encodings/cp1252.py",
        "_sysconfigdata__x.py",
    ):
        assert not data.is_wanted(name)
    assert data.is_wanted("encodings/__init__.py")


@pytest.mark.parametrize("tokens", [64, 257, 2049])
def test_documents_are_exact_in_length_and_fixed_by_the_seed(encode: recall.Encode, tokens: int) -> None:
    for number in range(12):
        first, second = (recall.recall_row(random.Random(number), encode, filler, tokens) for _ in range(2))
        assert first == second
        assert len(first.ids) == len(first.weights) == tokens
    assert recall.recall_row(random.Random(0), encode, filler, tokens) != recall.recall_row(
        random.Random(1), encode, filler, tokens
    )


@pytest.mark.parametrize("style", ["table", "needle"])
@pytest.mark.parametrize("distance", [256, 1024, 1900])
def test_probes_ask_for_one_definition_at_the_stated_distance(
    encode: recall.Encode, style: str, distance: int
) -> None:
    for probe in recall.recall_probes(0, 5, encode, filler, distance, style):
        assert abs(probe.distance - distance) <= 8
        assert len(probe.prompt) + len(probe.answer) <= 2048
        at = len(probe.prompt) - probe.distance
        assert probe.prompt[at : at + len(probe.answer)] == probe.answer
        key = probe.prompt[at - 2 : at]  # the key and its separator occur exactly twice: defined, asked
        if style == "table":
            assert sum(probe.prompt[i : i + 2] == key for i in range(len(probe.prompt))) == 2


def test_probes_are_fixed_by_the_seed(encode: recall.Encode) -> None:
    first, second, other = (
        list(recall.recall_probes(seed, 3, encode, filler, 256, "table")) for seed in (0, 0, 1)
    )
    assert first == second != other


def test_every_word_is_one_token_at_the_start_of_a_line_and_after_a_space(encode: recall.Encode) -> None:
    assert len(set(recall.word_list())) == 512
    for word in recall.word_list():
        assert len(encode(word)) == len(encode(" " + word)) == 1


@pytest.mark.parametrize("kind", ["number", "pair"])
def test_series_ask_for_definitions_at_about_the_stated_distance(encode: recall.Encode, kind: str) -> None:
    for series in recall.recall_series(2, 5, encode, 256, 4, (kind,)):
        tokens = [series.ids[start:stop] for start, stop in series.answers]
        assert len(tokens) == 4 and series.answers[-1][1] == len(series.ids)
        for (start, _), answer in zip(series.answers, tokens, strict=True):
            assert len(answer) > 2
            places = [i for i in range(256) if series.ids[i : i + len(answer)] == answer]
            assert len(places) == 1 and 256 - 4 * 16 <= start - places[0] <= 256 + 4 * 16
    again = [list(recall.recall_series(2, 2, encode, 256, 4, (kind,))) for _ in range(2)]
    assert again[0] == again[1] and again[0][0] != again[0][1]
