"""Every layout of trace becomes the same jobs, and a broken row is named by its number."""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from planner.types import Job
from planner.workload.traces import read_trace, write_trace

SHARED = Path(os.environ.get("DIPTYCH_SHARED", Path(__file__).resolve().parents[4] / ".." / "shared"))
ARRIVE = (
    '{"t": 0, "event": "arrive", "request": "a", "canary": false, "prompt_tokens": 5, "max_tokens": %s}\n'
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ALIKE = {
    "azure.csv": AZURE + "2023-11-16 18:15:46.6805900,30,4\n2023-11-16 18:15:47.1805900,5,6\n",
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 30, "output_length": 4}\n'
    '{"timestamp": 500, "input_length": 5, "output_length": 6}\n',
    "distserve.json": '[{"start_time": 0.0, "prompt_len": 30, "output_len": 4},'
    ' {"start_time": 0.5, "prompt_len": 5, "output_len": 6}]',
    "golden.csv": "req,arrival_s,prompt_len,output_len,ttft_ms\n0,0.0,30,4,1.5\n1,0.5,5,6,2.5\n",
    "jobs.jsonl": '{"at_s": 0.5, "prompt": 5, "output": 6}\n\n{"at_s": 0, "prompt": 30, "output": 4}\n',
}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ALIKE)
def test_every_layout_is_recognised_by_its_fields(name: str, tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, name, ALIKE[name]))
    assert [(round(job.at_s, 6), job.prompt, job.output) for job in found] == [(0.0, 30, 4), (0.5, 5, 6)]


@pytest.mark.parametrize(
    "rows",
    [
        "2024-05-12 01:59:59.5+00:00,30,4\n2024-05-12 02:00:00+00:00,5,6\n",
        "2024-03-31T01:59:59.5000000Z,30,4\n2024-03-31T02:00:00Z,5,6\n",
        "2024-03-31 01:59:59.5,30,4\n2024-03-31 04:00:00+02:00,5,6\n",
    ],
)
def test_dates_may_name_their_zone_and_are_utc_if_not(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        found = read_trace(write(tmp_path, "azure.csv", AZURE + rows))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [round(job.at_s, 6) for job in found] == [0.0, 0.5]


def test_lengths_alone_come_all_at_once(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, "lengths.csv", "prompt_len,output_len\r\n30,4\r\n5,6\r\n"))
    assert [job.at_s for job in found] == [0.0, 0.0]


def test_jobs_that_are_written_are_read_back_exactly(tmp_path: Path) -> None:
    jobs = [Job(0.1, 70, 3, "chat", (1, 2), 32), Job(1 / 3, 5, 1), Job(2.0, 600, 9, "", (7,), 512)]
    for name in ("plain.jsonl", "packed.jsonl.gz"):
        write_trace(tmp_path / name, jobs)
        assert read_trace(tmp_path / name) == jobs


def test_the_size_of_blocks_follows_from_their_number(tmp_path: Path) -> None:
    rows = [(1255, range(79)), (743, range(47)), (16, range(1))]
    text = "\n".join(
        json.dumps({"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": list(names)})
        for n, names in rows
    )
    path = write(tmp_path, "mooncake.jsonl", text)
    found = read_trace(path)
    assert {job.block_tokens for job in found} == {16}
    assert [len(job.prefix) for job in found] == [78, 46, 1]  # of the last, partial block nothing is said
    assert read_trace(path, block_tokens=512)[0].prefix == (0, 1)


def test_the_request_log_gives_lengths_and_beginnings(tmp_path: Path) -> None:
    def begin(request: str, *chunks: int) -> dict[str, object]:
        return {"t": 1.0, "event": "begin", "request": request, "chunks": list(chunks)}

    def arrive(
        t: float, request: str, tokens: int, priority: int = 0, canary: bool = False
    ) -> dict[str, object]:
        fields = {"prompt_tokens": tokens, "max_tokens": 50, "priority": priority, "canary": canary}
        return {"t": t, "event": "arrive", "request": request, **fields}

    def end(request: str, outcome: str, tokens: int) -> dict[str, object]:
        return {"t": 2.0, "event": "end", "request": request, "outcome": outcome, "output_tokens": tokens}

    lines = [
        {"t": 0.1, "event": "up", "worker": "p"},
        arrive(0.2, "canary", 4, canary=True),
        arrive(0.5, "a", 130),
        begin("a", 11, 12),
        end("a", "done", 20),
        arrive(1.5, "refused", 64, priority=-1),
        end("refused", "failed", 0),
        arrive(1.6, "b", 140),
        begin("b", 11, 13),
        end("b", "cancelled", 3),
        end("canary", "done", 1),
        arrive(0.25, "c", 10),  # another gateway's life
        end("c", "done", 10),
    ]
    found = read_trace(write(tmp_path, "log.jsonl", "\n".join(map(json.dumps, lines))))
    assert [(job.at_s, job.prompt, job.output, job.kind) for job in found] == [
        (0.5, 130, 20, ""),
        (1.5, 64, 15, "priority -1"),
        (1.6, 140, 3, ""),
        (2.25, 10, 10, ""),
    ]
    assert [job.prefix for job in found] == [(11, 12), (), (11, 13), ()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE + "2023-11-16 18:15:46,30,4\n2023-11-16 18:15:46,30\n", r"row 3.*2 fields"),
        (AZURE + "2023-11-16 18:15:46,30,4\nyesterday,30,4\n", r"row 3.*yesterday"),
        ("arrival_s,prompt_len,output_len\n0,30,4\n1,many,4\n", r"row 3.*many"),
        ("arrival_s,prompt_len,output_len\n0,30,0\n", r"row 2.*at least 1"),
        ("arrival_s,prompt_len,output_len\n-1,30,2\n", r"row 2.*not negative"),
        ("arrival_s,prompt_len,output_len\nnan,30,2\n", r"row 2.*finite"),
        ("arrival_s,prompt_len,output_len\n1e300,30,2\n", r"row 2.*at most 1e\+10"),
        ("[" * 100_000, r"not JSON"),
        ('{"at_s": ' + "[" * 100_000, r"row 1.*not JSON"),
        ('{"at_s": 0, "prompt": 3, "output": 4}\n{"at_s": 1, "prompt": 3}\n', r"row 2.*no output"),
        ('{"at_s": 0, "prompt": 3, "output": 4}\n{"at_s": 1, "prom', r"row 2.*not JSON"),
        ('{"at_s": 0, "prompt": 3, "output": 4}\n[1]\n', r"row 2.*not an object"),
        ('{"at_s": 0, "prompt": true, "output": 4}\n', r"row 1.*whole number"),
        ('{"at_s": 0, "prompt": 3.5, "output": 4}\n', r"row 1.*whole number"),
        ('{"at_s": 0, "prompt": 99, "output": 4, "prefix": ["x"]}\n', r"row 1.*list of whole numbers"),
        ('{"t": 0, "event": "arrive", "request": "a", "canary": false}\n', r"row 1.*request log"),
        ('{"t": NaN, "event": "up"}\n', r"row 1.*time is nan"),
        (ARRIVE % "Infinity", r"row 1.*request log"),
        (ARRIVE % "-3", r"row 1.*max_tokens is -3"),
        ('[{"start_time": 0, "prompt_len": 3, "output_len": 4}, 7]', r"row 2"),
        ("a,b\n1,2\n", r"layout"),
        ("", r"empty"),
        ("arrival_s,prompt_len,output_len\n", r"empty"),
        ("[1, 2", r"not JSON"),
    ],
)
def test_a_broken_row_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(write(tmp_path, "trace", text))
    lines = caught.value.lines()
    assert len(lines) <= 6
    assert re.search(message, " ".join(lines))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    (tmp_path / "plain.csv.gz").write_text("no gzip", encoding="utf-8")
    for name in ("bytes.csv", "cut.csv.gz", "plain.csv.gz", "nowhere.csv", "."):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_trace(tmp_path / name)
    with pytest.raises(ConfigError, match="no trace format"):
        read_trace(tmp_path / "bytes.csv", format="parquet")


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="needs shared/data, which is not here")
@pytest.mark.parametrize(
    ("name", "count", "last_s"),
    [
        ("azure/AzureLLMInferenceTrace_conv.csv", 19366, 3501.721937),
        ("samples/azure2023_conv_first600s_cpu8.jsonl", 2867, None),
        ("samples/mooncake_synthetic_first600s_cpu32.jsonl", 2190, None),
        ("distserve/golden/v66_longbench_r1.csv", 300, None),
        ("distserve/synth_lengths/humaneval_like.csv", 1640, 0.0),
    ],
)
def test_published_traces(name: str, count: int, last_s: float | None) -> None:
    found = read_trace(SHARED / "data" / name)
    assert len(found) == count
    assert last_s is None or found[-1].at_s == pytest.approx(last_s, abs=1e-4)


def test_classes_of_kv_are_kept(tmp_path: Path) -> None:
    """In our own layout, and from a request log: that of the last attempt that names one."""
    jobs = [Job(0.0, 10, 2), Job(1.0, 10, 2, kv_class="nuq4-1%"), Job(2.0, 10, 2, kv_class="raw")]
    write_trace(tmp_path / "t.jsonl", jobs)
    assert read_trace(tmp_path / "t.jsonl") == jobs
    lines = [ARRIVE % "20"]
    begin = {"t": 1.0, "event": "begin", "request": "a", "kv_class": "tq4.s0", "chunks": [7]}
    lines += [json.dumps(one) for one in (begin, begin | {"kv_class": ""})]
    (job,) = read_trace(write(tmp_path, "log.jsonl", "\n".join(lines)))
    assert job.kv_class == "tq4.s0"
