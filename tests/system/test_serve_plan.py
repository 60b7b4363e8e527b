"""`diptych serve --plan`: the planner's answer is what comes up, from one placement group, and a wrong one is refused.

The workers are stubs: what is tested is what is started, and where.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.placement.plan_file import (
    VERSION,
    PlanFile,
    PlanPool,
    PlanSlo,
    PlanTraffic,
    save_plan,
)
from services.host.ports import claim_port
from tests.support.terminal import Terminal, run
from tests.system import stub_child
from tests.system.plan_files import PREDICTED

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a plan for two cores needs them"),
]


def written(folder: Path, *pools: PlanPool, model: str = stub_child.READY, affinity: str = "low") -> str:
    slos = {"": PlanSlo(ttft_s=0.5, tpot_s=0.05)}
    path = folder / f"{model}.json"
    save_plan(
        path,
        PlanFile(
            version=VERSION,
            model=model,
            layers=6,
            devices_per_node=2,
            pools=pools,
            affinity=affinity,
            cross=1,
            slos=slos,
            traffic=PlanTraffic(name="sharegpt"),
            predicted=PREDICTED,
        ),
    )
    return str(path)


def test_a_plan_comes_up(tmp_path: Path) -> None:
    """A prefill and a decode worker on one node, in one placement group."""
    plan = written(tmp_path, PlanPool(role="prefill"), PlanPool(role="decode", device="cpu"))
    port = str(claim_port("127.0.0.1", 0))
    logs = tmp_path / "logs"
    with Terminal("serve", "--plan", plan, "--port", port, "--log-dir", str(logs), stubbed=True) as terminal:
        terminal.expect("stop with Ctrl-C")
        assert terminal.expect("diptych ").endswith(f"{stub_child.READY} · 1 prefill + 1 decode")
        assert "predicted to carry 7.5 requests/s" in terminal.expect("plan ")
        assert len(terminal.find("-m tests.system.stub_child")) == 3  # the workers, and the gateway
        assert {log.stem for log in logs.glob("*-*.log")} == {"prefill-0", "decode-0"}
        assert terminal.interrupt() == 0 and terminal.left() == []


def test_a_plan_for_something_else_is_refused_before_anything_starts(tmp_path: Path) -> None:
    pools = (
        PlanPool(role="prefill", tp=4, device="A100-80G"),
        PlanPool(role="decode", tp=2, device="A100-80G"),
    )
    for arguments, said in (
        (["--plan", written(tmp_path, *pools, model="OPT-66B")], "6 devices of the kind A100-80G"),
        (
            ["other/model", "--plan", written(tmp_path, PlanPool(role="both"), affinity="none")],
            "another model",
        ),
        (["--plan", str(tmp_path / "absent.json")], "cannot be read"),
    ):
        shown = run("serve", *arguments)
        assert shown.returncode == 2 and said in shown.stderr and not shown.stdout
        assert len(shown.stderr.strip().splitlines()) <= 6
