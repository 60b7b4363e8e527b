"""What the shape of an API costs: the time of a request on other routes over that of the same chat.

    python -m benchmarks.routes [--json] [--short] [--rounds 200] [--tokens 32]

One deployment of the embedded model. A client sends the same question with the same seed on each route in turn, one
at a time, in an order that moves on by one each round.

    route_ratio     the largest of the ratios below
    *_ratio         the median over rounds of: seconds on the route / seconds of the chat
    *_stream_ratio  the same of streamed answers
    same_tokens     whether all routes gave the same text
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

import benchmarks.script_path  # noqa: F401
from benchmarks.load.command_line import figure_parser, print_figures
from benchmarks.load.deployment import ANSWER_S, serving_deployment
from benchmarks.load.short_form import add_short_form
from benchmarks.tls import wait_ready

MODEL, WARM_UP, SEED = "tiny", 8, 7
QUESTION = "What is a list in Python?"


@dataclass(frozen=True)
class Route:
    """How a route is asked, and where the text of its answer is."""

    name: str
    path: str
    make_body: Callable[[int], dict[str, Any]]
    read_text: Callable[[dict[str, Any]], str]


MESSAGES = [{"role": "user", "content": QUESTION}]


def message_text(body: dict[str, Any]) -> str:
    """The text of an answer of `/v1/messages`."""
    return "".join(block["text"] for block in body["content"] if block["type"] == "text")


ROUTES = [
    Route(
        "chat",
        "/v1/chat/completions",
        lambda tokens: {"messages": MESSAGES, "max_tokens": tokens},
        lambda body: str(body["choices"][0]["message"]["content"]),
    ),
    Route(
        "responses",
        "/v1/responses",
        lambda tokens: {"input": QUESTION, "max_output_tokens": tokens},
        lambda body: "".join(
            part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]
        ),
    ),
    Route(
        "messages",
        "/v1/messages",
        lambda tokens: {"messages": MESSAGES, "max_tokens": tokens},
        message_text,
    ),
]


def ask_route(http: httpx.Client, route: Route, num_tokens: int, stream: bool) -> tuple[float, bytes]:
    """Seconds of one request until its whole answer was read, and the answer. Raises httpx.HTTPError."""
    body = {"model": MODEL, "seed": SEED, "ignore_eos": True, "stream": stream, **route.make_body(num_tokens)}
    begun_s = time.perf_counter()
    with http.stream("POST", route.path, json=body) as answer:
        answer.raise_for_status()
        content = answer.read()
    return time.perf_counter() - begun_s, content


def route_ratios(http: httpx.Client, num_rounds: int, num_tokens: int, stream: bool) -> dict[str, float]:
    """The median ratio of each route's time to that of the chat in the same round."""
    ratios: dict[str, list[float]] = {route.name: [] for route in ROUTES[1:]}
    for number in range(-WARM_UP, num_rounds):
        first = number % len(ROUTES)
        order = ROUTES[first:] + ROUTES[:first]
        times_s = {route.name: ask_route(http, route, num_tokens, stream)[0] for route in order}
        if number >= 0:
            for name, found in ratios.items():
                found.append(times_s[name] / times_s["chat"])
    suffix = "_stream_ratio" if stream else "_ratio"
    return {f"{name}{suffix}": round(statistics.median(found), 4) for name, found in ratios.items()}


def measure_routes(num_rounds: int, num_tokens: int) -> dict[str, Any]:
    """Start a deployment, and compare its routes."""
    flags = ("--colocated", "1", "--kv-cache-memory-bytes", "128MiB", "--no-pin-cores")
    with (
        serving_deployment(*flags) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=ANSWER_S) as http,
    ):
        wait_ready(http)
        texts = {
            route.name: route.read_text(json.loads(ask_route(http, route, num_tokens, False)[1]))
            for route in ROUTES
        }
        found = route_ratios(http, num_rounds, num_tokens, False)
        found |= route_ratios(http, num_rounds, num_tokens, True)
    return {"route_ratio": max(found.values()), **found, "same_tokens": len(set(texts.values())) == 1}


def main() -> None:
    """Measure and print."""
    parser = figure_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    add_short_form(parser, rounds=40)
    options = parser.parse_args()
    print_figures(measure_routes(options.rounds, options.tokens), options, "rounds", "tokens")


if __name__ == "__main__":
    main()
