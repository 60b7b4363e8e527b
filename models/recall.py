"""Synthetic documents whose later tokens can only be known by looking far back.

Three kinds, all drawn from a `random.Random`:

    table     amber = falcon        needle    (source text)                   chat   <|user|>
              stone = 4821                    # remember: amber = falcon             amber = falcon ...
              ...                             (source text)                          What is amber?<|end|>
              # recall                        # recall                               <|assistant|>
              amber = falcon                  amber = falcon                         amber = falcon<|end|>

A document is a list of pieces, text with a loss weight: what cannot be predicted (a fresh key, a fresh
value) weighs nearly nothing, an answer weighs more than ordinary text. `RecallProbe`s are the evaluation: one
question, at a known distance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Encode = Callable[[str], list[int]]
# Returns this many tokens of source text, which end a line.
Filler = Callable[[random.Random, int], list[int]]
Piece = tuple[str, float]

NOISE, PLAIN, ANSWER = 0.05, 0.3, 2.0
SEPARATORS = (" =", ":", " is", " ->")
REMEMBER, RECALL = "# remember: ", "# recall\n"
VALUE_KINDS = ("word", "word", "word", "number", "hex", "pair")


@cache
def word_list() -> tuple[str, ...]:
    """Common words of the corpus, each a single token of the tokenizer in this folder's `tiny/`."""
    return tuple((Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split())


def draw_value(rng: random.Random, kind: str) -> str:
    if kind == "number":
        return str(rng.randrange(1000, 10000))
    if kind == "hex":
        return f"{rng.randrange(1 << 24):06x}"
    if kind == "pair":
        return f"{rng.choice(word_list())}_{rng.choice(word_list())}"
    return rng.choice(word_list())


def draw_pairs(rng: random.Random, count: int, kind: str, long_keys: bool = False) -> list[tuple[str, str]]:
    """`count` distinct keys (at most one per word) with independent values."""
    keys = rng.sample(word_list(), min(count, len(word_list())))
    if long_keys:
        keys = [f"{key}_{rng.choice(word_list())}" for key in keys]
    return [(key, draw_value(rng, kind)) for key in keys]


def definition_pieces(pair: tuple[str, str], separator: str, prefix: str = "") -> list[Piece]:
    return [(prefix + pair[0], NOISE), (separator, PLAIN), (" " + pair[1], NOISE), ("\n", PLAIN)]


def question_pieces(pair: tuple[str, str], separator: str) -> list[Piece]:
    return [(pair[0], NOISE), (separator, PLAIN), (" " + pair[1], ANSWER), ("\n", ANSWER)]


def shuffled_pairs(rng: random.Random, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return rng.sample(pairs, len(pairs))


def table_pieces(rng: random.Random, pairs: list[tuple[str, str]], separator: str) -> list[Piece]:
    pieces = [piece for pair in pairs for piece in definition_pieces(pair, separator)]
    pieces.append((RECALL, PLAIN))
    return pieces + [
        piece for pair in shuffled_pairs(rng, pairs) for piece in question_pieces(pair, separator)
    ]


def chat_pieces(rng: random.Random, pairs: list[tuple[str, str]], separator: str) -> list[Piece]:
    pieces: list[Piece] = [("<|endoftext|>", NOISE), ("<|user|>\n", PLAIN)]
    pieces += [piece for pair in pairs for piece in definition_pieces(pair, separator)]
    for number, (key, value) in enumerate(shuffled_pairs(rng, pairs)):
        opening = "What is" if number == 0 else "<|user|>\nWhat is"
        pieces += [(opening, PLAIN), (" " + key, NOISE), ("?", PLAIN), ("<|end|>\n<|assistant|>\n", PLAIN)]
        pieces += [
            (key, ANSWER),
            (separator, ANSWER),
            (" " + value, ANSWER),
            ("<|end|>", ANSWER),
            ("\n", PLAIN),
        ]
    return pieces


def copied_pieces(rng: random.Random, count: int) -> list[Piece]:
    """The same words twice in the same order: what the first circuits of recall are learned from."""
    chosen = rng.sample(word_list(), min(count, len(word_list())))
    first = [(" " + word, NOISE) for word in chosen]
    again = [(" " + word, ANSWER if number else NOISE) for number, word in enumerate(chosen)]
    return [*first, ("\n", PLAIN), *again, ("\n", PLAIN)]


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """Token ids and, for each, how much its prediction counts."""

    ids: list[int]
    weights: list[float]


def flatten_pieces(pieces: list[Piece], encode: Encode) -> TrainingRow:
    ids: list[int] = []
    weights: list[float] = []
    for text, weight in pieces:
        tokens = encode(text)
        ids += tokens
        weights += [weight] * len(tokens)
    return TrainingRow(ids, weights)


def needle_row(rng: random.Random, encode: Encode, filler: Filler, tokens: int) -> TrainingRow:
    """Source text strewn with facts, all of them asked for at the end."""
    separator, kind = rng.choice(SEPARATORS), rng.choice(VALUE_KINDS)
    count = max(2, min(24, tokens // rng.choice((24, 48, 96))))
    pairs = draw_pairs(rng, count, kind)
    questions = flatten_pieces(
        [
            (RECALL, PLAIN),
            *(p for pair in shuffled_pairs(rng, pairs) for p in question_pieces(pair, separator)),
        ],
        encode,
    )
    facts = [flatten_pieces(definition_pieces(pair, separator, REMEMBER), encode) for pair in pairs]
    room = tokens - len(questions.ids) - sum(len(fact.ids) for fact in facts)
    cuts = sorted(rng.random() for _ in pairs)
    row = TrainingRow([], [])
    for fact, start, stop in zip(facts, [0.0, *cuts], cuts, strict=False):
        text = filler(rng, max(0, int((stop - start) * room)))
        row.ids.extend(text + fact.ids)
        row.weights.extend([1.0] * len(text) + fact.weights)
    text = filler(rng, max(0, int((1.0 - cuts[-1]) * room)))
    row.ids.extend(text + questions.ids)
    row.weights.extend([1.0] * len(text) + questions.weights)
    return row


def recall_row(
    rng: random.Random, encode: Encode, filler: Filler, tokens: int, easy: float = 0.1
) -> TrainingRow:
    """Exactly `tokens` tokens of recall material of one kind, tables from short to as long as fits.

    `easy` is the share of copies and of tables without a separator between key and value.
    """
    row = TrainingRow([], [])
    style = rng.choices(("table", "chat", "needle"), (5, 2, 3))[0]
    if rng.random() < easy:
        style = rng.choice(("copy", "bare"))
    while len(row.ids) < tokens:
        room = tokens - len(row.ids)
        if style == "needle" and room > 96:
            part = needle_row(rng, encode, filler, room)
        else:
            kind = "word" if style == "bare" else rng.choice(VALUE_KINDS)
            most = max(2.0, 0.6 * room / (4 if kind == "word" else 7))
            count = int(math.exp(rng.uniform(math.log(max(2.0, most / 12)), math.log(most))))
            pairs = draw_pairs(rng, max(2, count), kind, long_keys=rng.random() < 0.2)
            make = chat_pieces if style == "chat" else table_pieces
            separator = "" if style == "bare" else rng.choice(SEPARATORS)
            pieces = copied_pieces(rng, 2 * count) if style == "copy" else make(rng, pairs, separator)
            part = flatten_pieces(pieces, encode)
        row.ids.extend(part.ids)
        row.weights.extend(part.weights)
    return TrainingRow(row.ids[:tokens], row.weights[:tokens])


@dataclass(frozen=True, slots=True)
class RecallProbe:
    """A prompt that ends right before the value, and the value up to and including its newline."""

    prompt: list[int]
    answer: list[int]
    # Number of tokens from the value in the definition to the value in the question.
    distance: int


def probe_table(rng: random.Random, encode: Encode, distance: int, kind: str = "word") -> RecallProbe:
    """Between definition and question stand only other definitions; at least two more come before."""
    target, *others = draw_pairs(rng, len(word_list()), kind)
    lines = [flatten_pieces(definition_pieces(pair, " ="), encode).ids for pair in others]
    prompt = [token for line in lines[: rng.randint(2, 6)] for token in line]
    prompt += encode(target[0]) + encode(" =")
    start = len(prompt)
    answer = encode(" " + target[1]) + encode("\n")
    prompt += answer
    question = encode(RECALL) + encode(target[0]) + encode(" =")
    for line in reversed(lines):
        if len(prompt) + len(line) + len(question) - start > distance:
            break
        prompt += line
    prompt += question
    return RecallProbe(prompt, answer, len(prompt) - start)


def probe_needle(
    rng: random.Random, encode: Encode, filler: Filler, distance: int, kind: str = "word"
) -> RecallProbe:
    """Between definition and question stands source text."""
    key, value = draw_pairs(rng, 1, kind)[0]
    prompt = filler(rng, 24) + encode(REMEMBER + key) + encode(" =")
    start = len(prompt)
    answer = encode(" " + value) + encode("\n")
    question = encode(RECALL) + encode(key) + encode(" =")
    prompt += answer + filler(rng, distance - len(answer) - len(question)) + question
    return RecallProbe(prompt, answer, len(prompt) - start)


def recall_probes(
    seed: int, count: int, encode: Encode, filler: Filler, distance: int, style: str, kind: str = "word"
) -> Iterator[RecallProbe]:
    """`count` probes whose seeds no training document uses."""
    for number in range(count):
        rng = random.Random(f"probe/{seed}/{style}/{kind}/{distance}/{number}")
        if style == "table":
            yield probe_table(rng, encode, distance, kind)
        else:
            yield probe_needle(rng, encode, filler, distance, kind)


@dataclass(frozen=True, slots=True)
class RecallSeries:
    """A table and questions about it, one after the other, each with its true answer.

    `answers` has the half-open range of each answer's tokens within `ids`, its newline included.
    """

    ids: list[int]
    answers: list[tuple[int, int]]


def series_table(
    rng: random.Random, encode: Encode, distance: int, questions: int, kind: str
) -> RecallSeries:
    """The pairs that are asked for stand first, and other pairs follow until there are `distance` tokens.

    Later questions come after earlier answers, and are about as far from their definitions.
    """
    pairs = draw_pairs(rng, len(word_list()), kind)
    asked, others = pairs[:questions], pairs[questions:]
    lines = [flatten_pieces(definition_pieces(pair, " ="), encode).ids for pair in [*asked, *others]]
    ids = [token for line in lines[:questions] for token in line]
    for line in lines[questions:]:
        if len(ids) + len(line) > distance:
            break
        ids += line
    ids += encode(RECALL)
    answers = []
    for key, value in asked:
        ids += encode(key) + encode(" =")
        start = len(ids)
        ids += encode(" " + value) + encode("\n")
        answers.append((start, len(ids)))
    return RecallSeries(ids, answers)


def recall_series(
    seed: int, count: int, encode: Encode, distance: int, questions: int, kinds: tuple[str, ...]
) -> Iterator[RecallSeries]:
    """`count` tables with questions, kinds of values in turn, whose seeds no training document uses."""
    for number in range(count):
        kind = kinds[number % len(kinds)]
        rng = random.Random(f"series/{seed}/{kind}/{distance}/{number}")
        yield series_table(rng, encode, distance, questions, kind)
