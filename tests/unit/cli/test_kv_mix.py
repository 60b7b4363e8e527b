"""Which request asks for which class of KV: `--kv-mix`, what a trace says, and names that mean the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from diptych.errors import ConfigError
from planner.costs.kv.classes import plan_kv_classes
from planner.costs.profile_file import built_in_profile
from planner.types import Job
from planner.workload.kv_mix import KvMixedSource, class_shares, draw_classes
from planner.workload.workload import find_workload
from services.cli.plan.kv_mix import choose_kv_mix, class_resolver

PROFILE = built_in_profile("embedded", "cpu")
CLASSES = plan_kv_classes(PROFILE, "raw:0.25,nuq4-1%")


def choose(text: str | None, traced: dict[str, float] | None = None) -> dict[str, float]:
    return choose_kv_mix(text, CLASSES, PROFILE, traced or {})


def test_shares_are_those_of_the_flag_else_of_the_trace_else_all_are_the_first() -> None:
    assert choose("raw=0.7,nuq4-1%=0.3") == {"raw": 0.7, "nuq4-1%": 0.3}
    assert choose(" nuq4-1%=1 , raw=0") == {"nuq4-1%": 1.0}
    traced = {"": 0.1, "raw": 0.2, "nuq4-1%.g128@0123456789abcdef": 0.7}
    assert choose(None, traced) == pytest.approx({"raw": 0.3, "nuq4-1%": 0.7})
    assert choose("raw=1", traced) == {"raw": 1.0}
    assert choose(None) == {"raw": 1.0}
    assert choose_kv_mix(None, (), PROFILE, traced) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raw=0.7", "add up to 0.7"),
        ("raw=0.7,tq4=0.3", "raw and nuq4-1%"),
        ("raw=0.7,int5=0.3", "int5"),
        ("raw", "'raw' is not a class with a share"),
        ("raw=much,nuq4-1%=0.3", "'raw=much'"),
        ("raw=-1,nuq4-1%=2", "'raw=-1'"),
        ("raw=nan,nuq4-1%=1", "'raw=nan'"),
        ("raw=0.5,raw=0.5", "twice"),
        ("", "''"),
    ],
)
def test_what_is_no_mix_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(text)
    lines = caught.value.lines()
    assert len(lines) <= 6 and message in " ".join(lines)


def test_a_mix_without_classes_has_no_effect() -> None:
    with pytest.raises(ConfigError, match="no effect"):
        choose_kv_mix("raw=1", (), PROFILE, {})


def test_a_class_of_a_trace_that_workers_do_not_have_is_refused_with_both() -> None:
    with pytest.raises(ConfigError, match="the trace names the KV class tq4") as caught:
        choose(None, {"tq4": 1.0})
    assert "raw and nuq4-1%" in " ".join(caught.value.lines())
    resolve = class_resolver(CLASSES, PROFILE, "the trace")
    assert (resolve(""), resolve("nuq4-1%.g128"), resolve("raw")) == ("raw", "nuq4-1%", "raw")


def test_classes_are_drawn_by_their_shares_and_lengths_stay() -> None:
    source = find_workload("sharegpt")
    mixed = KvMixedSource(source, {"raw": 0.7, "nuq4-1%": 0.3})
    found, plain = mixed.sample(2000, 4.0, 1), source.sample(2000, 4.0, 1)
    assert [replace(job, kv_class="") for job in found] == plain
    assert Counter(job.kv_class for job in found)["raw"] == pytest.approx(1400, abs=80)
    assert mixed.sample(100, 4.0, 1) == found[:100], "a longer sample begins with the shorter one"
    assert mixed.mean() == source.mean()
    assert class_shares(found)["raw"] + class_shares(found)["nuq4-1%"] == pytest.approx(1.0)
    jobs = [Job(0.0, 1, 1)] * 4
    assert {job.kv_class for job in draw_classes(jobs, {"raw": 1.0}, 3)} == {"raw"}
