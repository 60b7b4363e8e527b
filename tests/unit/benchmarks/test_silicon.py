"""The closed loop of benchmarks/silicon.py, its rows, and that its figures are about what the documents say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.silicon import GATE_S, ROWS, Loop, bracket, errors, predict, read
from planner.costs.step import StepCost
from planner.hardware import find_device

COST = StepCost((1.0, 0.01, 0.0), ((0.5, 0.0, 0.25),))


def test_one_client_waits_for_nobody() -> None:
    ttft_s, tpot_s = Loop(COST, 10_000, [(100, 5), (100, 5)], 1, GATE_S).play()
    assert ttft_s == pytest.approx(GATE_S + 1.0 + 1.0) and tpot_s == pytest.approx(0.75)


def test_steps_in_one_go_are_the_steps_one_by_one() -> None:
    ttft_s, tpot_s = Loop(COST, 10_000, [(10, 1000)], 1, 0.0).play()
    assert ttft_s == pytest.approx(1.1) and tpot_s == pytest.approx(0.75)


def test_prompts_wait_for_room_and_all_are_answered() -> None:
    lengths = [(400, 50)] * 6
    wide, narrow = (Loop(COST, room, lengths, 6, 0.0) for room in (10_000, 1_000))
    assert narrow.play()[0] > 2 * wide.play()[0]
    assert len(narrow.ttft_s) == len(narrow.tpot_s) == 6


def test_rows_that_run_out_of_room_are_computed_again() -> None:
    loop = Loop(COST, 110, [(40, 60), (40, 60)], 2, 0.0)
    ttft_s, tpot_s = loop.play()
    assert len(loop.tpot_s) == 2 and tpot_s > Loop(COST, 1000, [(40, 60), (40, 60)], 2, 0.0).play()[1]


def test_the_rows_are_facts_about_devices_we_know() -> None:
    rows = read(ROWS)
    assert len(rows) == 44 and {row.device for row in rows} == {"h100", "h200"}
    assert all(find_device(row.device) and row.ttft_s > 0 and 0 < row.tpot_s < 1 for row in rows)


def test_the_collectors_own_file_is_read_too(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    head = "silicon_data_source,backend,model_path,system,mode,isl,osl,gemm_quant_mode,tp_size,pp_size"
    file.write_text(
        f"{head},silicon_ttft_ms,silicon_tpot_ms\n"
        "db; silicon_concurrency=8,trtllm,meta-llama/Llama-3.1-70B,h200_sxm,agg,1024,1024,fp8,4,1,250,8\n"
        "db; silicon_concurrency=8,trtllm,deepseek-ai/DeepSeek-R1,h200_sxm,agg,1024,1024,fp8,4,1,250,8\n"
        "db,vllm,meta-llama/Llama-3.1-70B,h200_sxm,agg,1024,1024,fp8,4,1,250,8\n"
    )
    (row,) = read(file)
    assert (row.shape.weight_bytes, row.kv_bytes, row.clients, row.tpot_s) == (1.0, 1.0, 8, 0.008)


def test_data_sheets_predict_light_loads_of_h100() -> None:
    rows = [row for row in read(ROWS) if row.device == "h100" and row.clients == 4]
    pairs = [(predict(row), row) for row in rows]
    assert errors([(times[1], row.tpot_s) for times, row in pairs])["mean"] < 0.15
    assert errors([(times[0], row.ttft_s) for times, row in pairs])["mean"] < 0.15


def test_disaggregated_rows_are_bracketed_not_scored() -> None:
    found = bracket()
    assert found["rows"] == found["ttft_above_lone"] == 5 and found["tpot_inside"] == 2
