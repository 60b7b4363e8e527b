"""Synthetic documents whose later tokens can only be known by looking far back.

Three kinds, all drawn from a `random.Random`:

    table     amber = falcon        needle    (source text)                   chat   <|user|>
              stone = 4821                    # remember: amber = falcon             amber = falcon ...
              ...                             (source text)                          What is amber?<|end|>
              # recall                        # recall                               <|assistant|>
              amber = falcon                  amber = falcon                         amber = falcon<|end|>

A document is a list of pieces, text with a loss weight: what cannot be predicted (a fresh key, a fresh
value) weighs nearly nothing, an answer weighs more than ordinary text. `Probe`s are the evaluation: one
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
Filler = Callable[[random.Random, int], list[int]]  # so many tokens of source text, ending a line
Piece = tuple[str, float]

NOISE, PLAIN, ANSWER = 0.05, 0.3, 2.0
SEPARATORS = (" =", ":", " is", " ->")
REMEMBER, RECALL = "# remember: ", "# recall\n"
VALUE_KINDS = ("word", "word", "word", "number", "hex", "pair")


@cache
def words() -> tuple[str, ...]:
    """Common words of the corpus, each a single token of the tokenizer in this folder's `tiny/`."""
    return tuple((Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split())


def draw_value(rng: random.Random, kind: str) -> str:
    if kind == "number":
        return str(rng.randrange(1000, 10000))
    if kind == "hex":
        return f"{rng.randrange(1 << 24):06x}"
    if kind == "pair":
        return f"{rng.choice(words())}_{rng.choice(words())}"
    return rng.choice(words())


def draw_pairs(rng: random.Random, count: int, kind: str, long_keys: bool = False) -> list[tuple[str, str]]:
    """`count` distinct keys (at most one per word) with independent values."""
    keys = rng.sample(words(), min(count, len(words())))
    if long_keys:
        keys = [f"{key}_{rng.choice(words())}" for key in keys]
    return [(key, draw_value(rng, kind)) for key in keys]


def define(pair: tuple[str, str], separator: str, prefix: str = "") -> list[Piece]:
    return [(prefix + pair[0], NOISE), (separator, PLAIN), (" " + pair[1], NOISE), ("\n", PLAIN)]


def ask(pair: tuple[str, str], separator: str) -> list[Piece]:
    return [(pair[0], NOISE), (separator, PLAIN), (" " + pair[1], ANSWER), ("\n", ANSWER)]


def shuffled(rng: random.Random, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return rng.sample(pairs, len(pairs))


def table(rng: random.Random, pairs: list[tuple[str, str]], separator: str) -> list[Piece]:
    pieces = [piece for pair in pairs for piece in define(pair, separator)]
    pieces.append((RECALL, PLAIN))
    return pieces + [piece for pair in shuffled(rng, pairs) for piece in ask(pair, separator)]


def chat(rng: random.Random, pairs: list[tuple[str, str]], separator: str) -> list[Piece]:
    pieces: list[Piece] = [("<|endoftext|>", NOISE), ("<|user|>\n", PLAIN)]
    pieces += [piece for pair in pairs for piece in define(pair, separator)]
    for number, (key, value) in enumerate(shuffled(rng, pairs)):
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


def copies(rng: random.Random, count: int) -> list[Piece]:
    """The same words twice in the same order: what the first circuits of recall are learned from."""
    chosen = rng.sample(words(), min(count, len(words())))
    first = [(" " + word, NOISE) for word in chosen]
    again = [(" " + word, ANSWER if number else NOISE) for number, word in enumerate(chosen)]
    return [*first, ("\n", PLAIN), *again, ("\n", PLAIN)]


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and, for each, how much its prediction counts."""

    ids: list[int]
    weights: list[float]


def flatten(pieces: list[Piece], encode: Encode) -> Row:
    ids: list[int] = []
    weights: list[float] = []
    for text, weight in pieces:
        tokens = encode(text)
        ids += tokens
        weights += [weight] * len(tokens)
    return Row(ids, weights)


def needles(rng: random.Random, encode: Encode, filler: Filler, tokens: int) -> Row:
    """Source text strewn with facts, all of them asked for at the end."""
    separator, kind = rng.choice(SEPARATORS), rng.choice(VALUE_KINDS)
    count = max(2, min(24, tokens // rng.choice((24, 48, 96))))
    pairs = draw_pairs(rng, count, kind)
    questions = flatten(
        [(RECALL, PLAIN), *(p for pair in shuffled(rng, pairs) for p in ask(pair, separator))], encode
    )
    facts = [flatten(define(pair, separator, REMEMBER), encode) for pair in pairs]
    room = tokens - len(questions.ids) - sum(len(fact.ids) for fact in facts)
    cuts = sorted(rng.random() for _ in pairs)
    row = Row([], [])
    for fact, start, stop in zip(facts, [0.0, *cuts], cuts, strict=False):
        text = filler(rng, max(0, int((stop - start) * room)))
        row.ids.extend(text + fact.ids)
        row.weights.extend([1.0] * len(text) + fact.weights)
    text = filler(rng, max(0, int((1.0 - cuts[-1]) * room)))
    row.ids.extend(text + questions.ids)
    row.weights.extend([1.0] * len(text) + questions.weights)
    return row


def document(rng: random.Random, encode: Encode, filler: Filler, tokens: int, easy: float = 0.1) -> Row:
    """Exactly `tokens` tokens of recall material of one kind, tables from short to as long as fits.

    `easy` is the share of copies and of tables without a separator between key and value.
    """
    row = Row([], [])
    style = rng.choices(("table", "chat", "needle"), (5, 2, 3))[0]
    if rng.random() < easy:
        style = rng.choice(("copy", "bare"))
    while len(row.ids) < tokens:
        room = tokens - len(row.ids)
        if style == "needle" and room > 96:
            part = needles(rng, encode, filler, room)
        else:
            kind = "word" if style == "bare" else rng.choice(VALUE_KINDS)
            most = max(2.0, 0.6 * room / (4 if kind == "word" else 7))
            count = int(math.exp(rng.uniform(math.log(max(2.0, most / 12)), math.log(most))))
            pairs = draw_pairs(rng, max(2, count), kind, long_keys=rng.random() < 0.2)
            make = chat if style == "chat" else table
            separator = "" if style == "bare" else rng.choice(SEPARATORS)
            pieces = copies(rng, 2 * count) if style == "copy" else make(rng, pairs, separator)
            part = flatten(pieces, encode)
        row.ids.extend(part.ids)
        row.weights.extend(part.weights)
    return Row(row.ids[:tokens], row.weights[:tokens])


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt that ends right before the value, and the value up to and including its newline."""

    prompt: list[int]
    answer: list[int]
    distance: int  # tokens from the definition's value to the question's


def probe_table(rng: random.Random, encode: Encode, distance: int, kind: str = "word") -> Probe:
    """Between definition and question stand only other definitions; at least two more come before."""
    target, *others = draw_pairs(rng, len(words()), kind)
    lines = [flatten(define(pair, " ="), encode).ids for pair in others]
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
    return Probe(prompt, answer, len(prompt) - start)


def probe_needle(
    rng: random.Random, encode: Encode, filler: Filler, distance: int, kind: str = "word"
) -> Probe:
    """Between definition and question stands source text."""
    key, value = draw_pairs(rng, 1, kind)[0]
    prompt = filler(rng, 24) + encode(REMEMBER + key) + encode(" =")
    start = len(prompt)
    answer = encode(" " + value) + encode("\n")
    question = encode(RECALL) + encode(key) + encode(" =")
    prompt += answer + filler(rng, distance - len(answer) - len(question)) + question
    return Probe(prompt, answer, len(prompt) - start)


def probes(
    seed: int, count: int, encode: Encode, filler: Filler, distance: int, style: str, kind: str = "word"
) -> Iterator[Probe]:
    """`count` probes whose seeds no training document uses."""
    for number in range(count):
        rng = random.Random(f"probe/{seed}/{style}/{kind}/{distance}/{number}")
        if style == "table":
            yield probe_table(rng, encode, distance, kind)
        else:
            yield probe_needle(rng, encode, filler, distance, kind)
