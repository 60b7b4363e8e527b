"""A worker that cannot serve as its gateway does is not taken, and both sides are named."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from diptych.messages import Hello
from diptych.request import CONTINUED, TRAITS
from router.effects import WorkerUnfit, WorkerUp
from router.workers.fleet import Fleet
from router.workers.worker_fit import find_misfit
from tests.unit.router.fake_deployment import make_hello

POOL = (64, 1 << 20)


def hello(*classes: str, keep: tuple[str, ...] = (), **more: Any) -> Hello:
    made = make_hello("decode-0", tokenizer="aaaa")
    return structs.replace(made, kv_classes=dict.fromkeys(classes, POOL), keep_classes=list(keep), **more)


@pytest.mark.parametrize(
    ("worker", "named"),
    [
        (hello("tq4"), "the class tq4 and can evict none"),
        (hello(), "the class raw and can evict none"),
        (hello("tq4", "raw", keep=("raw",)), "the class tq4 and can evict raw"),
        (hello("raw", "tq4", keep=("raw",), kv_auto=True), "the class auto and can evict raw"),
    ],
)
def test_workers_that_cannot_evict_do_not_fit_a_gateway_that_always_does(worker: Hello, named: str) -> None:
    problem = find_misfit(worker, kv_keep=0.9)
    assert problem is not None and named in problem and "--kv-keep 0.9" in problem and "\n" not in problem
    assert find_misfit(worker) is None, "requests that evict are checked one by one"


@pytest.mark.parametrize(
    "worker", [hello(keep=("raw",)), hello("raw", "tq4", keep=("raw",)), hello("tq4", keep=("tq4",))]
)
def test_workers_that_can_evict_what_requests_get_do_fit(worker: Hello) -> None:
    assert find_misfit(worker, "aaaa", 0.9) is None


def test_who_evicts_has_to_continue_everything() -> None:
    """A first token that was deferred could not be drawn from KV of which something was dropped."""
    for traits, fits in ((TRAITS, True), (CONTINUED, True), (TRAITS[1:], False), ((), False)):
        problem = find_misfit(hello(keep=("raw",), traits=traits))
        assert (problem is None) == fits and find_misfit(hello(traits=traits)) is None
        assert problem is None or "cannot continue grammar" in problem


def test_the_tokenizer_counts_first() -> None:
    problem = find_misfit(hello("tq4"), "bbbb", 0.9)
    assert problem is not None and "aaaa" in problem and "bbbb" in problem


def test_a_worker_is_taken_once_it_fits() -> None:
    fleet = Fleet(kv_keep=0.9)
    [unfit] = fleet.on_message("decode-0", hello("tq4"), 0.0)
    assert isinstance(unfit, WorkerUnfit) and fleet.find_mismatches() == {"decode-0": unfit.text}
    assert not fleet.workers
    restarted = hello("raw", keep=("raw",), link="2")
    [up, *_] = fleet.on_message("decode-0", restarted, 1.0)
    assert isinstance(up, WorkerUp) and not fleet.find_mismatches()
