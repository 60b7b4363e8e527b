"""The command line without a deployment: help, messages, ports, plans, what is shown, and the guard."""

from __future__ import annotations

import datetime
import fcntl
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console

from diptych.config.fields import URL_ENV, list_settings
from diptych.config.load import load_config
from diptych.config.options import Config
from diptych.errors import ModelError, StartError
from services.cli.client import admin, flags
from services.cli.client.status import parse_state as read_state
from services.cli.client.status import show_state
from services.cli.main import COMMANDS, load_command
from services.cli.serve.launch import describe_data_dir, describe_gateways, ready_box
from services.cli.serve.progress import StartProgress
from services.cli.serve.settings_reference import settings_table
from services.cli.serve.specs import assign_cores, deployment_spec, gateway_spec, with_default_data_dir
from services.host.model_probe import ProbedModel
from services.host.ports import claim_port
from services.host.supervision.process_guard import MAX_TEMP_CHARS
from services.host.supervision.supervisor import ChildStatus, ErrorReport

ROOT = Path(__file__).parents[3]
MODEL = ProbedModel(
    path="/models/some", summary="a model", has_chat_template=True, max_model_len=512, kv_bytes=1 << 20
)


def diptych(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DIPTYCH_")}
    return subprocess.run(
        [sys.executable, "-m", "services.cli.main", *arguments],
        cwd=ROOT, env=kept | {"COLUMNS": "100", "NO_COLOR": "1"} | env, capture_output=True, text=True, timeout=150,
    )  # fmt: skip


# ---- help and messages


def test_help_is_short_grouped_and_has_examples() -> None:
    shown = diptych("serve", "--help")
    assert shown.returncode == 0
    assert "diptych serve Qwen/Qwen2.5-0.5B-Instruct" in shown.stdout
    for panel in ("Model", "Pools", "Engine and KV cache", "HTTP", "SLOs and limits"):
        assert f"─ {panel} ─" in shown.stdout
    assert len(shown.stdout.splitlines()) <= 72
    common = [one for one in list_settings(Config, "serve") if not one.rare and one.name != "model"]
    assert [one.flag for one in common if one.flag not in shown.stdout] == []
    assert "--reader-stall-s" not in shown.stdout


def test_a_narrow_terminal_shows_whole_names() -> None:
    shown = diptych("serve", "--help", COLUMNS="80").stdout
    common = [one for one in list_settings(Config, "serve") if not one.rare and one.name != "model"]
    assert [one.flag for one in common if f" {one.flag} " not in shown] == []
    assert "…" not in shown


def test_help_all_has_every_setting_of_the_command() -> None:
    shown = diptych("serve", "--help-all").stdout
    for one in list_settings(Config, "serve"):
        assert one.flag in shown and one.env in shown
    assert "--advertise-host" not in shown and "--advertise-host" in settings_table("worker")


def test_a_wrong_switch_is_refused_with_the_forms_that_work() -> None:
    shown = diptych("serve", DIPTYCH_ENABLE_PREFIX_CACHING="maybe")
    assert shown.returncode == 2 and "--enable-prefix-caching or --no-enable-prefix-caching" in shown.stderr


def test_neither_torch_nor_ray_is_loaded_for_help() -> None:
    code = "import sys, services.cli.main; print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_version_names_the_parts_that_matter() -> None:
    shown = diptych("version")
    assert shown.returncode == 0 and shown.stdout.startswith("diptych ")
    assert "torch 2." in shown.stdout and "ray 2." in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--port", "http"], "--port: 'http' is not a whole number"),
        (["serve", "a/b", "--model", "c/d"], "the model is given twice"),
        (["serve", "--colocated", "1", "--prefill", "1"], "either colocated or has two pools"),
        (["serve", "--config", "absent.yaml"], "absent.yaml cannot be read"),
        (["serve", "--host", "0.0.0.0"], "no API key is set"),
        (["worker", "prefill"], "`diptych worker` needs --channel"),
        (["serve", "--prot", "1"], "No such option: --prot"),
        (["switch-role", "decode-0", "juggler", "--admin-key", "k"], "there is no role 'juggler'"),
        (["drain", "decode-0"], "diptych drain needs a key"),
        (["drain", "decode-0", "--admin-key", "a\nb"], "the key cannot be sent"),
        (["status", "--api-key", "a\nb"], "the key cannot be sent"),
    ],
)
def test_wrong_usage_is_explained_briefly_and_ends_with_2(arguments: list[str], said: str) -> None:
    shown = diptych(*arguments)
    assert shown.returncode == 2
    assert said in shown.stderr and "Traceback" not in shown.stderr
    assert len(shown.stderr.strip().splitlines()) <= 6


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_own_help_says(name: str) -> None:
    help_text = " ".join((load_command(name).help or "").partition("\n\n")[0].split())
    assert help_text == COMMANDS[name].summary


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--url", "http://127.0.0.1:1"]])
def test_small_commands_import_little(arguments: list[str]) -> None:
    """Each of these takes a tenth of a second or more to import."""
    heavy = (
        "asyncio",
        "httpx",
        "psutil",
        "yaml",
        "numpy",
        "scipy",
        "ray",
        "torch",
        "pydantic_settings",
        "diptych.config.options",
        "planner",
    )
    code = f"""
import sys
from services.cli.main import main
sys.argv[1:] = {arguments!r}
try:
    main()
except SystemExit:
    print(*(name for name in {heavy!r} if name in sys.modules))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == ""


def test_a_misspelt_command_is_refused_and_a_near_one_named() -> None:
    shown = diptych("stattus")
    assert shown.returncode == 2 and "status" in shown.stderr and "Traceback" not in shown.stderr


def test_the_address_is_read_from_the_same_variable_everywhere() -> None:
    assert flags.URL_ENV == URL_ENV


def test_status_fits_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stats = {"slabs_used": 3, "slabs_cached": 33, "slabs_total": 512, "running": 4, "waiting": 7, "leases": 2}
    worker = {"worker": "prefill-10", "role": "prefill", "state": "draining", "stats": stats}
    hits = {"prefix_queries": 128, "prefix_hits": 64}
    show_state(read_state({"ready": True, "workers": [worker | {"stats": stats | hits}]}))
    out = capsys.readouterr().out
    (shown,) = [line.split() for line in out.splitlines() if "prefill-10" in line]
    assert "…" not in out and "waiting" in out and "cached" in out
    assert shown == ["prefill-10", "prefill", "draining", "4", "7", "3", "33", "512", "2", "50%"]


def test_status_shows_the_room_of_each_class(capsys: pytest.CaptureFixture[str]) -> None:
    stats = {"slabs_used": 5, "slabs_cached": 9, "slabs_total": 40, "running": 4, "waiting": 7, "leases": 2}
    classes = {
        "raw": {"slabs": 8, "used": 3, "cached": 9, "chunk_bytes": 4096},
        "tq4.s0": {"slabs": 32, "used": 2, "cached": 0, "chunk_bytes": 576},
    }
    worker = {"worker": "decode-0", "role": "decode", "state": "up", "stats": stats, "kv_classes": classes}
    link = {
        "source": "prefill-0",
        "target": "decode-0",
        "transport": "shm",
        "gb_per_s": 9.0,
        "latency_us": 3.0,
    }
    link["kv_classes"] = {"raw": True, "tq4.s0": False}
    show_state(read_state({"ready": True, "workers": [worker], "links": [link]}))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["decode-0", "decode", "up", "4", "7", "5", "9", "40", "2"] in lines
    assert ["3", "9", "8", "raw"] in lines and ["2", "0", "32", "tq4.s0"] in lines
    assert lines[-1][-4:] == ["raw,", "tq4.s0", "(not", "proven)"]


def test_status_shows_the_transfer_buffer_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    stats = {"buffer_slabs": 32, "buffer_used": 9, "buffer_leased": 4, "buffer_cached": 7}
    worker = {
        "worker": "prefill-0",
        "role": "prefill",
        "state": "up",
        "device": "NVIDIA H200",
        "stats": stats,
    }
    other = {
        "worker": "decode-0",
        "role": "decode",
        "state": "up",
        "device": "cpu",
        "stats": {"buffer_slabs": 0},
    }
    show_state(read_state({"ready": True, "workers": [worker, other]}))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "buffer" in line]
    assert line.startswith(
        "prefill-0 on NVIDIA H200: of 32 slabs of the transfer buffer 9 are used, 4 of them"
    )


def test_status_shows_the_mode_of_auto(capsys: pytest.CaptureFixture[str]) -> None:
    auto = {"budget_pct": 1.0, "classes": ["raw", "nuq4-1%"], "lighter": []}
    show_state(read_state({"ready": True, "kv_auto": auto | {"classes": ["raw"]}}))
    assert "auto" not in capsys.readouterr().out
    show_state(read_state({"ready": True, "kv_auto": auto}))
    assert "auto: raw, nuq4-1%, within 1 %; the better class on all pairs" in capsys.readouterr().out
    lighter = [
        {"source": "prefill-0", "target": "decode-1", "reason": "link", "since_s": 12.4},
        {"source": None, "target": "decode-2", "reason": "pool", "since_s": 3.0},
    ]
    show_state(read_state({"ready": True, "kv_auto": auto | {"lighter": lighter}}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].endswith("nuq4-1%, within 1 %")
    assert lines[-2].strip() == "prefill-0 → decode-1: the lighter class for 12 s, since the link binds"
    assert lines[-1].strip() == "decode-2: the lighter class for 3 s, since the pool binds"


def test_status_and_chat_say_when_nobody_answers() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for command in (["status"], ["chat", "hello"], ["drain", "decode-0", "--admin-key", "k"]):
            shown = diptych(*command, "--url", url)
            assert shown.returncode == 1
            assert f"no gateway answers at {url}" in shown.stderr
            assert len(shown.stderr.strip().splitlines()) <= 6


# ---- orders for one worker


class Orders(BaseHTTPRequestHandler):
    """A gateway that notes what it is ordered to do, and refuses as `refuses` says."""

    noted: list[tuple[str, str | None, object]] = []
    refuses = 0
    code = "last_worker"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.noted.append((self.path, self.headers["Authorization"], body))
        error = {"message": "it is the last one", "code": self.code if self.refuses == 409 else ""}
        said = json.dumps({"error": error} if self.refuses else {}).encode()
        self.send_response(self.refuses or 202)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Orders, "noted", [])
    with HTTPServer(("127.0.0.1", 0), Orders) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_draining_and_switching_a_worker_are_asked_of_the_gateway(
    orders: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admin.drain_worker(orders, "k1", "decode-0", False) == 0
    assert admin.switch_role(f"{orders}/v1/", "k2", "odd/na me", "prefill", True) == 0
    assert Orders.noted == [
        ("/admin/workers/decode-0/drain", "Bearer k1", {"force": False}),
        ("/admin/workers/odd%2Fna%20me/turn", "Bearer k2", {"role": "prefill", "force": True}),
    ]
    assert "decode-0 drains" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "fix"), [(401, "--admin-key"), (404, "diptych status"), (409, "--force")])
def test_a_refused_order_says_what_would_help(
    orders: str, status: int, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Orders, "refuses", status)
    with pytest.raises(StartError) as caught:
        admin.drain_worker(orders, "k", "decode-0", False)
    assert (str(status) in caught.value.what, caught.value.why) == (True, "it is the last one")
    assert fix in caught.value.fix and len(caught.value.lines()) <= 6


@pytest.mark.parametrize("code", ["same_role", "worker_draining", "not_split"])
def test_force_is_not_advised_where_it_does_not_help(
    orders: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Orders, "refuses", 409)
    monkeypatch.setattr(Orders, "code", code)
    with pytest.raises(StartError) as caught:
        admin.switch_role(orders, "k", "decode-0", "decode", False)
    assert "--force" not in "".join(caught.value.lines())


def test_keys_of_any_language_can_be_sent(orders: str) -> None:
    assert admin.drain_worker(orders, "clé", "decode-0", False) == 0
    assert Orders.noted[0][1] == "Bearer clé".encode().decode("latin-1")


# ---- ports


@pytest.fixture
def busy() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_busy_port_names_the_process_that_holds_it(busy: int) -> None:
    with pytest.raises(StartError) as caught:
        claim_port("127.0.0.1", busy, "DIPTYCH_PORT")
    error = caught.value
    assert f"port {busy} on 127.0.0.1 is in use" in error.what
    assert f"process {os.getpid()} holds it: {psutil.Process().name()}" in error.why
    assert "DIPTYCH_PORT" in error.why and "--port " in error.fix


def test_the_command_line_of_another_server_is_not_shown() -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    command = [sys.executable, "-c", code, "--api-key", "the-secret-of-somebody"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        try:
            with pytest.raises(StartError) as caught:
                claim_port("127.0.0.1", int(other.stdout.readline()))
        finally:
            other.stdin.close()
    text = "\n".join(caught.value.lines())
    assert f"process {other.pid} holds it" in text and "secret" not in text


def test_port_0_is_any_free_one() -> None:
    port = claim_port("127.0.0.1", 0)
    assert claim_port("127.0.0.1", port) == port > 0


@pytest.mark.parametrize(
    ("host", "said"), [("192.0.2.77", "cannot listen on"), ("no.such.host.invalid", "is not known")]
)
def test_a_host_that_is_not_ours_is_refused(host: str, said: str) -> None:
    with pytest.raises(StartError) as caught:
        claim_port(host, 0)
    assert said in caught.value.what


# ---- plans


def test_a_plan_has_every_worker_with_its_own_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {4, 6, 9})
    given = {"prefill": "1", "decode": "3", "served_model_name": ["a", "b"], "enable_chunked_prefill": False}
    loaded = load_config("serve", given | {"slo_ttft_ms": "0.5s", "kv_lease_s": "3s"}, {})
    made = deployment_spec(loaded, MODEL, tmp_path, tmp_path / "logs", 4567, 8000, ("k",))
    assert [one.worker for one in made.workers] == ["prefill-0", "decode-0", "decode-1", "decode-2"]
    assert [one.core for one in made.workers] == [4, 6, 9, 4]
    assert {one.gateway for one in made.workers} == {made.gateway.channel} == {"tcp://127.0.0.1:4567"}
    first = made.workers[0]
    assert (first.kv_bytes, first.max_model_len, first.chunked_prefill, first.lease_s) == (
        1 << 20,
        512,
        False,
        3.0,
    )
    assert (made.gateway.num_prefill, made.gateway.num_decode) == (1, 3)
    assert (made.gateway.served_names, made.gateway.api_keys) == (("a", "b"), ("k",))
    assert (made.gateway.slo_ttft_ms, made.gateway.max_model_len) == (500.0, 512)


@pytest.mark.parametrize(
    ("given", "keyed", "metrics", "status"),
    [
        ({}, True, (), ()),
        ({"metrics_key": "m" * 16}, True, ("m" * 16,), None),
        ({"metrics_key": "m" * 16}, False, ("m" * 16,), None),
        ({"admin_key": "a" * 16}, True, ("a" * 16,), ("a" * 16,)),
        ({"admin_key": "a" * 16}, False, (), ()),
        ({"metrics_key": "m" * 16, "admin_key": "a" * 16}, True, ("m" * 16, "a" * 16), ("a" * 16,)),
    ],
)
def test_who_may_read_the_figures(
    given: dict[str, str],
    keyed: bool,
    metrics: tuple[str, ...],
    status: tuple[str, ...] | None,
    tmp_path: Path,
) -> None:
    """Where `status` is None nobody has the key that opens /status: the deployment made it for itself."""
    keys = ("k" * 16,) if keyed else ()
    made = deployment_spec(
        load_config("serve", given, {}), MODEL, tmp_path, tmp_path, 1, 2, keys, priority_keys=keys
    )
    assert made.gateway.metrics_keys == metrics and made.gateway.priority_keys == keys
    if status is None:
        (own,) = made.gateway.status_keys
        assert len(own) >= 32 and own not in (*given.values(), *keys)
    else:
        assert made.gateway.status_keys == status
    assert made.gateway.status_key == next(iter((*made.gateway.status_keys, *keys)), None)


@pytest.mark.parametrize(
    ("given", "kept", "optional"),
    [
        ({}, "HOME/diptych/batches", True),
        ({"bulk": 1, "prefill": 0, "decode": 0}, "HOME/diptych/batches", False),
        ({"data_dir": "/srv/d"}, "/srv/d", False),
        ({"data_dir": "./none"}, "CWD/none", False),
        ({"data_dir": "none"}, None, False),
    ],
)
def test_files_and_batches_have_a_folder_unless_they_are_off(
    given: dict[str, Any], kept: str | None, optional: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("serve", given, {}).config
    alone = gateway_spec(config, MODEL, "tcp://x", "keys", 0, ())
    made = with_default_data_dir(alone, config, {"XDG_DATA_HOME": str(tmp_path)})
    expected = kept and kept.replace("HOME", str(tmp_path)).replace("CWD", os.getcwd())
    assert (made.data_dir, made.data_dir_optional) == (expected, optional)
    # A gateway that is started alone has one only if it is named.
    assert alone.data_dir == (None if "data_dir" not in given else expected)
    monkeypatch.setenv("HOME", "/home/her")
    at_home = with_default_data_dir(alone, config, {}).data_dir
    if not alone.data_dir and given.get("data_dir") != "none":
        assert at_home == "/home/her/.local/share/diptych/batches"


def test_the_start_names_the_folder_or_says_why_there_is_none() -> None:
    config = load_config("serve", {}, {}).config
    gateway = with_default_data_dir(gateway_spec(config, MODEL, "tcp://x", "keys", 0, ()), config, {})
    assert describe_data_dir(gateway, {"enabled": True}) == [
        f"files and batches are kept in {gateway.data_dir}"
    ]
    (off,) = describe_data_dir(gateway, {"enabled": False, "off": "it is in use"})
    assert off.startswith("files and batches are off: it is in use; --data-dir DIR")
    config = load_config("serve", {"data_dir": "none"}, {}).config
    gateway = with_default_data_dir(gateway_spec(config, MODEL, "tcp://x", "keys", 0, ()), config, {})
    assert describe_data_dir(gateway, {"enabled": False, "off": "x"}) == []


def test_processes_that_take_http_are_named_where_there_are_several() -> None:
    assert describe_gateways(1, 2) == []
    assert describe_gateways(2, 2) == ["2 processes take HTTP"]
    assert describe_gateways(3, 2) == ["3 processes take HTTP; this machine has 2 cores for them"]


def test_a_colocated_plan_has_a_decode_pool_only(tmp_path: Path) -> None:
    made = deployment_spec(load_config("serve", {"colocated": "2"}, {}), MODEL, tmp_path, tmp_path, 1, 2, ())
    assert [one.role for one in made.workers] == ["decode", "decode"]
    assert (made.gateway.num_prefill, made.gateway.num_decode) == (0, 2)


def test_a_plan_tells_each_part_what_the_engine_settings_mean_for_it(tmp_path: Path) -> None:
    given = {"prefill_tp": "2", "decode_pp": "3", "swap_space": "1GiB", "slo_tpot_ms": "40"}
    made = deployment_spec(
        load_config("serve", given | {"enable_prefix_caching": False}, {}),
        MODEL,
        tmp_path,
        tmp_path,
        1,
        2,
        (),
    )
    assert [(one.tp, one.pp) for one in made.workers] == [(2, 1), (1, 3)]
    assert {(one.prefix_caching, one.swap_bytes, one.tpot_ms) for one in made.workers} == {
        (False, 1 << 30, None)
    }
    assert made.gateway.prefix_caching is False
    both = deployment_spec(
        load_config("serve", {"colocated": "1", "slo_tpot_ms": "40"}, {}), MODEL, tmp_path, tmp_path, 1, 2, ()
    )
    assert both.workers[0].tpot_ms == 40 and both.workers[0].prefix_caching and both.gateway.prefix_caching


@pytest.mark.parametrize("given", [{"pin_cores": False}, {"threads": "2"}, {"device": "cuda"}])
def test_workers_are_not_pinned_where_that_would_hurt(given: dict[str, object]) -> None:
    assert assign_cores(load_config("serve", given, {}).config, [0, 1], [1, 2]) == [None, None]


def test_every_rank_has_a_core_of_its_own_as_far_as_they_go() -> None:
    config = load_config("serve", {}, {}).config
    assert assign_cores(config, [2, 3, 5, 7, 11], [2, 1, 4]) == [
        2,
        5,
        7,
    ]  # the last one's ranks on 7, 11, 2 and 3


# ---- what is shown


@pytest.mark.parametrize(
    ("given", "path"), [({}, "completions"), ({"chat_template": "a.jinja"}, "chat/completions")]
)
def test_the_first_request_that_is_shown_suits_the_model(
    tmp_path: Path, given: dict[str, str], path: str
) -> None:
    base = msgspec.structs.replace(MODEL, has_chat_template=False)
    made = deployment_spec(load_config("serve", given, {}), base, tmp_path, tmp_path, 1, 2, ())
    assert f"/v1/{path} " in ready_box(made.gateway, base)


def shown_by(statuses: list[ChildStatus], num_workers: int = 2) -> str:
    out = io.StringIO()
    view = StartProgress(Console(file=out, width=80), num_workers)
    view.begin_phase("load")
    for status in statuses:
        view.on_status(status)
    return out.getvalue()


def test_a_phase_ends_when_the_last_worker_is_through() -> None:
    first = [
        ChildStatus("a", phase="load", done=1, total=2),
        ChildStatus("a", phase="warm"),
        ChildStatus("b", phase="load"),
    ]
    assert shown_by(first) == ""
    then = shown_by([*first, ChildStatus("b", phase="warm", done=1, total=2)])
    assert then.startswith("load") and "warm-up" not in then
    ready = [ChildStatus("a", "ready", "ready"), ChildStatus("b", "ready", "ready")]
    assert [line.split()[0] for line in shown_by(ready).splitlines()] == ["load", "warm-up"]


def test_a_start_is_ready_though_more_workers_were_adopted() -> None:
    view = StartProgress(Console(file=io.StringIO(), width=80), 2)
    for worker in ("a", "b", "c"):
        view.on_status(ChildStatus(worker, "ready", "ready"))
        assert view.workers_ready == (worker != "a")


def test_a_restart_that_nobody_saw_is_shown_all_the_same() -> None:
    out = io.StringIO()
    view = StartProgress(Console(file=out, width=80), 1, up=True)
    for status in (
        ChildStatus("gateway", "ready"),
        ChildStatus("gateway", "ready", restarts=1, ended="killed by SIGKILL"),
    ):
        view.on_status(status)
    assert out.getvalue().splitlines() == [
        "gateway ended (killed by SIGKILL), starting it again",
        "gateway is back (start 2)",
    ]


def test_a_death_and_a_return_are_one_line_each() -> None:
    out = io.StringIO()
    view = StartProgress(Console(file=out, width=80), 1, up=True)
    ended = ChildStatus("d-0", "waiting", crashes=1, restarts=1, ended="killed by SIGKILL")
    ready = ChildStatus("d-0", "ready", restarts=1)
    for status in (ChildStatus("d-0", "ready"), ended, ended, ChildStatus("d-0", restarts=1), ready, ready):
        view.on_status(status)
    assert out.getvalue().splitlines() == [
        "d-0 ended (killed by SIGKILL), starting it again",
        "d-0 is back (start 2)",
    ]
    view.on_status(
        ChildStatus(
            "d-0", "waiting", crashes=5, restarts=2, ended="exit status 1", error=ErrorReport("no memory")
        )
    )
    assert "d-0 ended (exit status 1: no memory); 5 times in a row, trying on" in out.getvalue()


def test_errors_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    StartProgress(Console(), 1).print_error(ModelError("it does not fit", "a\nb", "c"))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: it does not fit\n  why: a\n       b\n  fix: c\n"


# ---- the guard


GUARDED = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from services.host.supervision.process_guard import run_guarded_with_folder

def run(folder):
    (folder / "secret").write_text("x")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    # A daemon: it leaves its session, and its parent ends, so that nobody is left to stop it.
    subprocess.run([sys.executable, "-c", "import os, subprocess, sys; "
                    "print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=2).pid)"], stdout=pipe)
    print(json.dumps({"pid": os.getpid(), "folder": str(folder)}), flush=True)
    if sys.argv[1] == "end":
        return 7
    while True:
        time.sleep(60)

pipe = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
sys.exit(run_guarded_with_folder(run))
"""


def guard(tmp_path: Path, what: str) -> tuple[subprocess.Popen[str], SimpleNamespace, psutil.Process]:
    """A guarded process that has left an orphan: the guard, what its child printed, the orphan."""
    started = subprocess.Popen(
        [sys.executable, "-c", GUARDED, what, str(tmp_path / "orphan")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stdout is not None
    child_info = SimpleNamespace(**json.loads(started.stdout.readline()))
    orphan = int((tmp_path / "orphan").read_text())
    return started, child_info, psutil.Process(orphan) if psutil.pid_exists(orphan) else psutil.Process()


@contextmanager
def open_folder(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def gone(started: subprocess.Popen[str], child_info: SimpleNamespace, orphan: psutil.Process) -> int:
    code = started.wait(90)
    assert started.stdout is not None
    started.stdout.close()
    if orphan.pid != os.getpid():
        orphan.wait(90)
    assert not psutil.pid_exists(child_info.pid) and not Path(child_info.folder).exists()
    return code


def test_the_guard_passes_the_exit_status_on_and_leaves_nothing(tmp_path: Path) -> None:
    assert gone(*guard(tmp_path, "end")) == 7


def test_the_guard_survives_a_kill_of_its_child(tmp_path: Path) -> None:
    started, child_info, orphan = guard(tmp_path, "stay")
    assert os.stat(child_info.folder).st_mode & 0o777 == 0o700
    with (
        open_folder(child_info.folder) as folder,
        pytest.raises(BlockingIOError),
    ):  # as a cleaner asks before it goes on
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    psutil.Process(child_info.pid).kill()
    assert gone(started, child_info, orphan) == 128 + 9


def test_a_kill_of_the_guard_s_group_is_a_kill_of_the_guard_alone(tmp_path: Path) -> None:
    """So its child goes on, gets SIGTERM, and removes the folder."""
    started, child_info, orphan = guard(tmp_path, "stay")
    os.killpg(os.getpgid(started.pid), signal.SIGKILL)
    child = psutil.Process(child_info.pid)
    assert started.wait(90) == -signal.SIGKILL
    psutil.wait_procs([child], timeout=90)
    assert not child.is_running() and not Path(child_info.folder).exists()
    assert started.stdout is not None
    started.stdout.close()
    if orphan.pid != os.getpid():
        orphan.kill()  # without a guard nobody adopts it: those of `diptych serve` end with their parents


def test_a_long_temporary_folder_leaves_room_for_a_socket_s_path() -> None:
    session = datetime.datetime(2026, 12, 31, 23, 59, 59, 999999).strftime(
        "session_%Y-%m-%d_%H-%M-%S_%f_4194304"
    )
    path = f"{'t' * MAX_TEMP_CHARS}/diptych-abcdefgh/ray/{session}/sockets/plasma_store"
    assert len(path) == 107


def test_the_guard_forwards_signals(tmp_path: Path) -> None:
    started, child_info, orphan = guard(tmp_path, "stay")
    started.terminate()
    assert gone(started, child_info, orphan) == 5


def test_a_kill_of_the_guard_ends_its_child(tmp_path: Path) -> None:
    started, child_info, orphan = guard(tmp_path, "stay")
    child = psutil.Process(child_info.pid)
    started.kill()
    started.wait(90)
    child.wait(90)
    orphan.kill()  # nobody is left to do it; in `serve` the child stops what it started
    assert not Path(child_info.folder).exists()
    assert started.stdout is not None
    started.stdout.close()


# ---- folders that cannot be written


def test_a_folder_for_logs_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = diptych("serve", "tiny", "--port", "0", "--log-dir", str(tmp_path / "file" / "logs"))
    output = ended.stdout + ended.stderr
    assert ended.returncode == 2 and "Traceback" not in output and len(output.splitlines()) <= 6
    assert "logs cannot be written" in output and "--log-dir" in output and "Not a directory" in output


NOWHERE = """
import sys, tempfile
def gettempdir():
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
tempfile.gettempdir = gettempdir
from services.cli.main import main
sys.argv[0] = "diptych"
main()
"""


@pytest.mark.parametrize("command", ["serve", "gateway", "worker"])
def test_a_private_folder_is_needed_by_serve_alone(tmp_path: Path, command: str) -> None:
    """As in a container whose root is read-only; the others get as far as the model that is not there."""
    words = [] if command == "gateway" else ["decode"] if command == "worker" else ["tiny"]
    if command != "serve":
        words += ["--model", "/nowhere", "--channel", "tcp://127.0.0.1:9", "--keys-dir", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-c", NOWHERE, command, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode in (1, 2) and "Traceback" not in output and len(output.splitlines()) <= 6
    assert (
        ("no folder can be made" in output and "TMPDIR" in output)
        if command == "serve"
        else "/nowhere" in output
    )
