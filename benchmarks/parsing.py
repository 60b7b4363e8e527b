"""Whether answers are read right, however they arrive, and what a token costs.

    python -m benchmarks.parsing [--json] [--short] [--answers 5000] [--seed 0] [--suite FOLDER]

Made-up answers of every family (thoughts, words, calls with random arguments) become tokens of the embedded model's
vocabulary, with the family's markers as added tokens, and are read twice: token by token, and in pieces of random
length. Every second answer has its markers as plain text.

    stream_equal    share of answers that are read the same both ways
    read_right      share that say exactly what they were made from
    markup          answers whose content has a marker
    parse_us        microseconds of the processor per token for reader and detokenizer; detokenize_us: for the
                    detokenizer alone
    parser_fail     outputs of a public suite, read whole, by characters and at every cut, that are read otherwise than
                    it says; differences of policy and families that are not served are listed beside

`--suite` is the folder `fixtures` of the suite `canitoolcall`: get its wheel with `pip download --no-deps canitoolcall`
and unpack it. Without it this part is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import benchmarks.script_path  # noqa: F401
from benchmarks.load.short_form import add_short_form
from benchmarks.parsing_parts.suite import measure_suite
from services.gateway.parsing.answer_markup import AnswerMarkup
from services.gateway.parsing.answer_parts import AnswerPart, ToolTypes
from services.gateway.parsing.answer_reader import AnswerReader
from services.gateway.parsing.families import choose_format
from services.gateway.tokenization.detokenizer import Detokenizer
from services.gateway.tokenization.tokenizer import GatewayTokenizer

ROOT = Path(__file__).parents[1]
TOOLS: ToolTypes = {
    "get_weather": {"city": ("string",), "days": ("integer",), "parts": ("array",)},
    "search": {"query": ("string",), "limit": ("integer",)},
    "now": {},
}
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """How answers of a family are written: a thought, words, and calls."""

    tool_parser: str
    reasoning_parser: str
    thought: str
    write_calls: Callable[[list[Call]], str]
    words: str = "{}"


def write_each(form: str, calls: list[Call]) -> str:
    """Each call in a form with %NAME% and %JSON%."""
    return "".join(form.replace("%NAME%", name).replace("%JSON%", json.dumps(args)) for name, args in calls)


def write_tags(calls: list[Call]) -> str:
    """Calls of Qwen3-Coder."""
    return "".join(
        f"\n<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in args.items())
        + "</function>\n</tool_call>"
        for name, args in calls
    )


def write_pairs(calls: list[Call]) -> str:
    """Calls of GLM."""
    return "".join(
        f"\n<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
            for key, value in args.items()
        )
        + "</tool_call>"
        for name, args in calls
    )


def write_gemma(calls: list[Call]) -> str:
    """Calls of Gemma 4."""

    def write(value: Any) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(write, value))}]"
        return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)

    return "".join(
        f"<|tool_call>call:{name}{{{','.join(f'{key}:{write(value)}' for key, value in args.items())}}}<tool_call|>"
        for name, args in calls
    )


def write_list(calls: list[Call]) -> str:
    """Calls of Mistral's first models."""
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": args} for name, args in calls])


def plain(value: Any) -> str:
    """A value as it stands between tags."""
    return value if isinstance(value, str) else json.dumps(value)


HERMES = '\n<tool_call>\n{"name": "%NAME%", "arguments": %JSON%}\n</tool_call>'
HARMONY = (
    "<|start|>assistant<|channel|>commentary to=functions.%NAME% <|constrain|>json<|message|>%JSON%<|call|>"
)
FAMILIES = [
    Family("hermes", "qwen3", "<think>\n{}\n</think>\n\n", partial(write_each, HERMES)),
    Family("qwen3_coder", "qwen3", "<think>\n{}\n</think>\n\n", write_tags),
    Family("llama3_json", "none", "", partial(write_each, '<|python_tag|>{"name": "%NAME%", "parameters": %JSON%}')),
    Family("mistral", "mistral", "[THINK]{}[/THINK]", write_list),
    Family("mistral", "mistral", "[THINK]{}[/THINK]", partial(write_each, "[TOOL_CALLS]%NAME%[ARGS]%JSON%")),
    Family(
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>{}<|end|>",
        partial(write_each, HARMONY),
        "<|start|>assistant<|channel|>final<|message|>{}<|end|>",
    ),
    Family("gemma4", "gemma4", "<|channel>thought\n{}<channel|>", write_gemma),
    Family("glm45", "glm45", "<think>{}</think>\n", write_pairs),
    Family(
        "deepseek_v31",
        "deepseek_r1",
        "<think>{}</think>",
        partial(write_each, "<｜tool▁call▁begin｜>%NAME%<｜tool▁sep｜>%JSON%<｜tool▁call▁end｜>"),
    ),
    Family("tiny", "none", "", partial(write_each, "<|tool|>%NAME%(%JSON%)")),
]  # fmt: skip


@dataclass(frozen=True)
class MadeAnswer:
    """An answer and what it says."""

    text: str
    reasoning: str
    content: str
    calls: list[Call]


def make_answer(family: Family, rng: random.Random, words: Sequence[str]) -> MadeAnswer:
    """A random answer of a family."""

    def sentence(most: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, most)))

    def argument(types: tuple[str, ...]) -> Any:
        if types == ("string",):
            return sentence(6) + rng.choice(["", ' "x" {y}', "\\n", " é 你好"])
        return rng.randint(-9, 99) if types == ("integer",) else [rng.randint(0, 9), sentence(2)]

    reasoning = sentence(40) if family.thought and rng.random() < 0.6 else ""
    calls = [
        (name, {key: argument(types) for key, types in TOOLS[name].items()})
        for name in rng.choices(list(TOOLS), k=rng.choice([0, 1, 1, 2, 3]))
    ]
    content = sentence(40) if rng.random() < 0.6 or not calls else ""
    text = family.thought.format(reasoning) if reasoning else ""
    text += family.words.format(content) if content else ""
    return MadeAnswer(text + (family.write_calls(calls) if calls else ""), reasoning, content, calls)


def read_tokens(
    markup: AnswerMarkup, detokenizer: Detokenizer, groups: Sequence[Sequence[int]]
) -> list[AnswerPart]:
    """What an answer says whose tokens come in groups."""
    reader, mark_of, parts = AnswerReader(markup, "", TOOLS), markup.mark_of, []
    for group in groups:
        for token in group:
            mark = mark_of.get(token)
            reader.feed(detokenizer.feed(token) if mark is None else detokenizer.flush() + mark)
        parts += reader.take_parts()
    reader.feed(detokenizer.flush())
    reader.close()
    return parts + reader.take_parts()


def join_said(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    """What parts say, however they were cut."""
    said: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for part in parts:
        if part.kind == "call":
            said["tool_calls"].append({"name": part.text, "arguments": ""})
        elif part.kind == "arguments":
            said["tool_calls"][part.call]["arguments"] += part.text
        else:
            said[part.kind] += part.text
    return said


def parse_arguments(said: dict[str, Any]) -> list[Call]:
    """The calls that were read, with their arguments as objects. Raises ValueError if they are no JSON."""
    return [(call["name"], json.loads(call["arguments"])) for call in said["tool_calls"]]


def cut_groups(tokens: Sequence[int], rng: random.Random) -> Iterator[Sequence[int]]:
    """The tokens in groups of random length."""
    at = 0
    while at < len(tokens):
        count = rng.choice([1, 2, 3, 8])
        yield tokens[at : at + count]
        at += count


def measure_made(num_answers: int, seed: int) -> dict[str, float]:
    """The figures of made-up answers."""
    rng, words = random.Random(seed), (ROOT / "models" / "words.txt").read_text().split()
    loaded = [(family, *load_vocabulary(family)) for family in FAMILIES]
    equal = right = markup_shown = num_tokens = 0
    parse_s = detokenize_s = 0.0
    for index in range(num_answers):
        family, tokenizer, with_tokens, as_text = loaded[index % len(loaded)]
        markup = as_text if index // len(loaded) % 2 else with_tokens
        answer = make_answer(family, rng, words)
        tokens = tokenizer.backend.encode(answer.text).ids
        if markup is as_text:
            # No token of a text that spells its markers is one.
            tokens = [one for char in answer.text for one in tokenizer.backend.encode(char).ids]
        begin_s = time.process_time()
        single = read_tokens(markup, tokenizer.new_detokenizer(False), [[token] for token in tokens])
        parse_s += time.process_time() - begin_s
        begin_s = time.process_time()
        detokenizer = tokenizer.new_detokenizer(False)
        for token in tokens:
            detokenizer.feed(token)
        detokenize_s += time.process_time() - begin_s
        num_tokens += len(tokens)
        grouped = read_tokens(markup, tokenizer.new_detokenizer(False), [*cut_groups(tokens, rng)])
        said = join_said(single)
        equal += said == join_said(grouped)
        try:
            found = (said["reasoning"], said["content"], parse_arguments(said))
        except ValueError:
            found = ("", "", [])
        right += found == (answer.reasoning, answer.content, answer.calls)
        shown = [literal for literal in markup.format.literals if len(literal) > 1]
        markup_shown += any(literal in said["content"] for literal in shown)
    return {
        "answers": num_answers,
        "stream_equal": equal / num_answers,
        "read_right": right / num_answers,
        "markup": markup_shown,
        "parse_us": round(parse_s / num_tokens * 1e6, 2),
        "detokenize_us": round(detokenize_s / num_tokens * 1e6, 2),
    }


def load_vocabulary(family: Family) -> tuple[GatewayTokenizer, AnswerMarkup, AnswerMarkup]:
    """The embedded model's vocabulary with a family's markers, and its markup as tokens and as text."""
    tokenizer = GatewayTokenizer.load(str(ROOT / "models" / "tiny"))
    answer_format = choose_format("", family.tool_parser, family.reasoning_parser)
    assert answer_format is not None
    tokenizer.backend.add_special_tokens([literal for literal in answer_format.literals if len(literal) > 1])
    added = {one.content: token for token, one in tokenizer.backend.get_added_tokens_decoder().items()}
    markup = AnswerMarkup(answer_format, added.get)
    return tokenizer, markup, AnswerMarkup(answer_format, lambda literal: None)


def read_pieces(
    markup: AnswerMarkup, prefix: str, tools: ToolTypes | None, pieces: Sequence[str]
) -> dict[str, Any]:
    """What an answer of marked text says that comes in pieces."""
    reader = AnswerReader(markup, prefix, tools)
    for piece in pieces:
        reader.feed(piece)
    reader.close()
    return join_said(reader.take_parts())


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--answers", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suite", type=Path, default=None, help="recorded outputs of models")
    add_short_form(parser, answers=1000)
    options = parser.parse_args()
    figures: dict[str, Any] = dict(measure_made(options.answers, options.seed))
    if options.suite is not None:
        figures |= measure_suite(options.suite, read_pieces)
    if options.json:
        print(json.dumps(figures, indent=2, ensure_ascii=False))
    else:
        for name, value in figures.items():
            print(f"{name:16} {value}")


if __name__ == "__main__":
    main()
