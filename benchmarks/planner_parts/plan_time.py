"""What `diptych plan` costs until its first and whole answer, and that machine code changes no plan and no figure.

    python -m benchmarks.planner --only plans [--short] [--json]

Each question is asked in a process of its own. Seconds are of a processor, since other programs may run.

    first_answer_s, plan_s   until the first line, and until the end, start and imports included
    over_torch               the same over `python -c "import torch"`
    same_plan                of small questions, the share with one answer by machine code and by Python alone
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import benchmarks.script_path  # noqa: F401

# What a user asks, by name; each without a rate, and for one.
QUESTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "8b_8xh200": ({"model": "Llama-3.1-8B", "device": "H200", "slo_ttft_ms": 250.0, "slo_tpot_ms": 50.0}, 60.0),
    "66b_8xa100": ({"model": "OPT-66B", "device": "A100-80G", "slo_ttft_ms": 2500.0, "slo_tpot_ms": 150.0}, 4.0),
    "70b_4x8xh100": (
        {"model": "Llama-3.1-70B", "device": "H100", "nodes": 4, "gpus_per_node": 8, "slo_ttft_ms": 500.0,
         "slo_tpot_ms": 50.0},
        40.0,
    ),
}  # fmt: skip


def asked_questions() -> dict[str, dict[str, Any]]:
    """The questions that are timed."""
    found: dict[str, dict[str, Any]] = {}
    for name, (question, rate) in QUESTIONS.items():
        given = question if "nodes" in question else question | {"gpus": 8}
        found |= {name: given, f"{name}_rate": given | {"rate": rate}}
    return found


def small_questions(count: int) -> list[dict[str, Any]]:
    """Twenty questions whose answer Python finds in half a minute, or the first of them."""
    found: list[dict[str, Any]] = []
    for ttft_ms, tpot_ms in ((250.0, 100.0), (400.0, 60.0), (1000.0, 80.0), (2500.0, 40.0), (300.0, 200.0)):
        for more in ({"gpus": 2}, {"gpus": 4}, {"gpus": 4, "rate": 3.0}, {"gpus": 2, "chunk_tokens": 0}):
            slos = {"slo_ttft_ms": ttft_ms, "slo_tpot_ms": tpot_ms}
            short = {"horizon": 600, "span_s": 3.0, "seeds": 1}
            found.append({"model": "OPT-13B", "device": "A100-80G", **slos, **more, **short})
    return found[:: len(found) // count]


def spent_s(command: list[str], **environment: str) -> tuple[float, str]:
    """Seconds of a processor of a command, and what it prints."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def ask(question: dict[str, Any], **environment: str) -> dict[str, Any]:
    """The answer to a question, and when it came."""
    command = [sys.executable, "-m", "benchmarks.planner_parts.plan_time", json.dumps(question)]
    spent, printed = spent_s(command, **environment)
    answer: dict[str, Any] = json.loads(printed)
    return answer | {"plan_s": round(spent, 2)}


def plans(short: bool) -> dict[str, Any]:
    """All figures; `short`: fewer small questions, and only the first question is timed."""
    torch_s = min(spent_s([sys.executable, "-c", "import torch"])[0] for _ in range(2))
    questions = asked_questions()
    timed = {}
    for name in list(questions)[:1] if short else questions:
        answer = ask(questions[name])
        over = {"over_torch": [round(answer[key] / torch_s, 2) for key in ("first_answer_s", "plan_s")]}
        timed[name] = {key: answer[key] for key in ("first_answer_s", "plan_s", "first", "best")} | over
    same = []
    for question in small_questions(4 if short else 20):
        quick, long = ask(question), ask(question, NUMBA_DISABLE_JIT="1")
        same.append(quick["answer"] == long["answer"])
    return {
        "torch_s": round(torch_s, 2),
        "first_answer_s": max(one["first_answer_s"] for one in timed.values()),
        "plan_s": max(one["plan_s"] for one in timed.values()),
        "same_plan": sum(same) / len(same),
        "small_questions": len(same),
        "questions": timed,
    }


def main() -> None:
    """Answers one question; prints the answer, and the seconds until the first one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("question", help="fields of the options of `diptych plan`, as JSON")
    question = json.loads(parser.parse_args().question)
    from planner.placement.families import first_answer
    from planner.placement.solve import solve_placement
    from planner.report.explain import solution_json
    from services.cli.plan.command import read_problem
    from services.cli.plan.options import PlanOptions

    problem = read_problem(PlanOptions(**question))
    first = first_answer(problem)
    first_answer_s = time.process_time()
    found = solution_json(solve_placement(problem))
    found.pop("simulated")
    report = {"first": str(first.placement) if first else None, "best": found["best"]["placement"]}
    print(json.dumps(report | {"first_answer_s": round(first_answer_s, 2), "answer": found}))


if __name__ == "__main__":
    main()
