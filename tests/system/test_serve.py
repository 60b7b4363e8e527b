"""`diptych serve` from the first line to the last process: what it shows, what it survives, that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from diptych.channel.keys import KEY_FILES
from services.host.ports import claim_port
from tests.support.terminal import ROOT, Terminal, clean_environ, run, traps
from tests.system import stub_child

KEY = "a-key-of-the-tests"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """The embedded model, from both pools, on a free port, with a key; the working directory is full of traps."""
    folder = tmp_path_factory.mktemp("cwd")
    packages = (path.parent.name for path in ROOT.glob("*/__init__.py"))
    marker = traps(folder, [*packages, "json", "numpy", "ray", "torch"])
    with Terminal(
        "serve", "--port", str(claim_port("127.0.0.1", 0)), "--api-key", KEY, cwd=folder
    ) as terminal:
        terminal.expect("stop with Ctrl-C")
        assert not marker.exists(), marker.read_text()
        yield terminal


@pytest.fixture
def url(served: Terminal) -> str:
    return served.expect(lambda line: line.startswith("http")).removesuffix("/v1")


def test_every_phase_is_shown_with_its_time(served: Terminal) -> None:
    shown = [line.split()[0] for line in served.lines[: served.lines.index(served.expect("─ ready ─"))]]
    assert shown[0] == "diptych"
    assert sorted(shown[1:3]) == ["model", "ray"] and shown[3:] == ["load", "warm-up", "canary"]
    canary = served.expect(lambda line: line.startswith("canary"))
    assert "prefill-0 → decode-0 shm" in canary and "GB/s" in canary and "µs" in canary


def test_the_printed_curl_streams_an_answer(served: Terminal) -> None:
    at = served.lines.index(served.expect(lambda line: line.startswith("curl")))
    command = "\n".join(served.lines[at : at + 2])
    environ = clean_environ(DIPTYCH_API_KEY=KEY)
    shown = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True, check=True)
    events = [line for line in shown.stdout.splitlines() if line.startswith("data: ")]
    assert len(events) > 2 and events[-1] == "data: [DONE]"
    answers = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert all("choices" in answer and "error" not in answer for answer in answers), shown.stdout


def test_the_printed_python_prints_an_answer(served: Terminal) -> None:
    at = served.lines.index(served.expect(lambda line: line.startswith("import")))
    code = "\n".join(served.lines[at : at + 4])
    shown = subprocess.run(
        ["python", "-c", code],
        env=clean_environ(DIPTYCH_API_KEY=KEY, PATH=_path()),
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip()


def _path() -> str:
    return f"{Path(psutil.Process().cmdline()[0]).parent}:/usr/bin:/bin"


def test_status_tells_workers_links_and_books(served: Terminal, url: str) -> None:
    result = run("status", "--url", url, "--api-key", KEY, "--json")
    state = json.loads(result.stdout)
    assert result.returncode == 0 and state["ready"]
    assert {one["worker"] for one in state["workers"]} == {"prefill-0", "decode-0"}
    table = run("status", "--url", url, DIPTYCH_API_KEY=KEY).stdout
    assert table.startswith("ready") and "decode-0" in table and "prefill-0 → decode-0 shm" in table


def test_chat_answers_one_question_and_holds_a_conversation(served: Terminal, url: str) -> None:
    once = run("chat", "What is a list?", "--url", url, "--api-key", KEY, "--max-tokens", "8")
    assert once.returncode == 0 and once.stdout.strip(), once.stderr
    talk = run(
        "chat", "--url", url, "--api-key", KEY, "--max-tokens", "4", says="One?\n\nTwo?\n/quit\nThree?\n"
    )
    assert talk.returncode == 0 and len(talk.stdout.splitlines()) >= 2, talk.stderr
    refused = run("chat", "What is a list?", "--url", url)
    assert refused.returncode == 1 and "401" in refused.stderr and "--api-key" in refused.stderr
    assert len(refused.stderr.splitlines()) <= 6


def test_a_second_server_on_the_same_port_names_the_first(served: Terminal, url: str) -> None:
    port = url.rsplit(":", 1)[1]
    result = run("serve", "--port", port)
    assert result.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in result.stderr and "services.gateway" in result.stderr
    assert len(result.stderr.splitlines()) <= 6


@pytest.mark.parametrize("name", ["decode-0", "prefill-0", "gateway"])
def test_a_killed_part_comes_back_and_serves_again(served: Terminal, url: str, name: str) -> None:
    if name == "gateway":
        part = served.gateway()
    else:
        state = json.loads(run("status", "--url", url, "--api-key", KEY, "--json").stdout)
        part = psutil.Process(next(one["pid"] for one in state["workers"] if one["worker"] == name))
    shutil.rmtree(folder_of(served) / "keys")  # as programs do that clean temporary folders
    part.kill()
    served.expect(f"{name} ended (killed by SIGKILL), starting it again")
    served.expect(f"{name} is back")
    curl = [
        "curl",
        "-s",
        "--retry",
        "60",
        "--retry-all-errors",
        "--retry-delay",
        "1",
        "--fail",
        f"{url}/ready",
    ]
    assert subprocess.run(curl, capture_output=True).returncode == 0
    answer = run("chat", "Again?", "--url", url, "--api-key", KEY, "--max-tokens", "4")
    assert answer.returncode == 0, answer.stderr


def folder_of(served: Terminal) -> Path:
    """The private folder of a deployment."""
    head = served.find("gcs_server")[0]
    log_dir = next(word for word in head.cmdline() if word.startswith("--log_dir=")).split("=")[1]
    return Path(log_dir.split("/ray/")[0])


def test_ray_listens_on_this_machine_alone_and_wants_a_token(served: Terminal) -> None:
    heads = served.find("gcs_server")
    assert heads
    for one in served.remember():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends meanwhile
            places = [c.laddr.ip for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            assert all(ip.removeprefix("::ffff:").startswith("127.") for ip in places), (one, places)
    port = next(c.laddr.port for c in heads[0].net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    right = heads[0].environ()["RAY_AUTH_TOKEN"]
    assert ask_ray(port, "0" * 64) is ask_ray(port, None) is grpc.StatusCode.UNAUTHENTICATED
    assert ask_ray(port, right) is grpc.StatusCode.OK


def test_ray_has_no_process_that_nothing_needs(served: Terminal) -> None:
    (raylet,) = served.find("raylet/raylet")
    agents = [one for one in served.find("services/cluster/local_ray/agent.py") if one != raylet]
    assert [one.parent() for one in agents] == [raylet, raylet]
    for unused in ("autoscaler/_private/monitor", "log_monitor", "dashboard/dashboard.py", "DashboardAgent"):
        assert served.find(unused) == []


def ask_ray(port: int, token: str | None) -> grpc.StatusCode:
    """The status of the first question of everyone who joins: which cluster is this?"""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            return call.with_call(b"", metadata=metadata, timeout=30)[1].code()
        except grpc.RpcError as error:
            return error.code()


def test_ctrl_c_stops_everything_and_leaves_nothing(served: Terminal) -> None:
    """Runs last: it ends the deployment of this module."""
    assert len(served.remember()) > 8
    assert served.interrupt() == 0
    assert served.lines[-1] == "stopping"
    assert served.left() == []


# ---- the same with stubs: what happens when parts of the start-up die


@pytest.fixture
def stubbed() -> Iterator[Terminal]:
    with Terminal(
        "serve", stub_child.READY, "--port", str(claim_port("127.0.0.1", 0)), stubbed=True
    ) as terminal:
        terminal.expect("stop with Ctrl-C")
        yield terminal


@pytest.fixture(scope="module")
def outlasting() -> Iterator[Terminal]:
    """For the tests of what it outlasts, one after the other; the last of them ends it."""
    with Terminal(
        "serve", stub_child.READY, "--port", str(claim_port("127.0.0.1", 0)), stubbed=True
    ) as terminal:
        terminal.expect("stop with Ctrl-C")
        yield terminal


def test_a_killed_actor_is_placed_again_with_its_worker(outlasting: Terminal) -> None:
    stubbed = outlasting
    before = {one.pid for one in stubbed.find("-m tests.system.stub_child")}
    actor = next(
        one.parent() for one in stubbed.find("-m tests.system.stub_child") if "ray" in _name(one.parent())
    )
    assert actor is not None
    keys = folder_of(stubbed) / "keys"
    shutil.rmtree(keys)
    actor.kill()
    stubbed.expect("ended (its supervisor died), starting it again")
    stubbed.expect("is back")
    assert len(before - {one.pid for one in stubbed.find("-m tests.system.stub_child")}) == 1
    assert sorted(path.name for path in keys.iterdir()) == sorted(KEY_FILES)


def _name(process: psutil.Process | None) -> str:
    return " ".join(process.cmdline()) if process else ""


def test_a_dead_ray_head_stops_neither_serving_nor_restarts(outlasting: Terminal) -> None:
    stubbed, num_lines = outlasting, len(outlasting.lines)
    (head,) = stubbed.find("gcs_server")
    head.kill()
    worker = next(one for one in stubbed.find("-m tests.system.stub_child") if "ray" in _name(one.parent()))
    worker.kill()
    stubbed.expect("ended (killed by SIGKILL), starting it again")
    stubbed.expect(lambda line: "is back" in line and line in stubbed.lines[num_lines:])


def test_ctrl_c_stops_what_is_left_after_that(outlasting: Terminal) -> None:
    """After all of the above; runs last of those that share this deployment."""
    assert outlasting.interrupt() == 0 and outlasting.left() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dead_ray_head_is_outlived_beyond_its_reconnection_time(stubbed: Terminal) -> None:
    before = {one.pid for one in stubbed.find("-m tests.system.stub_child")}
    stubbed.find("gcs_server")[0].kill()
    with pytest.raises(subprocess.TimeoutExpired):
        stubbed.process.wait(90)  # Ray's own limit is 60 s
    assert before == {one.pid for one in stubbed.find("-m tests.system.stub_child")}


def test_a_kill_of_serve_leaves_nothing(stubbed: Terminal) -> None:
    (serve,) = psutil.Process(stubbed.process.pid).children()
    stubbed.remember()
    serve.kill()
    assert stubbed.wait() == 128 + 9
    assert stubbed.left() == []


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_kill_of_the_guard_leaves_nothing(stubbed: Terminal, whole_group: bool) -> None:
    folder = folder_of(stubbed)
    assert folder.is_dir()
    stubbed.remember()
    if whole_group:
        os.killpg(stubbed.process.pid, signal.SIGKILL)
    else:
        stubbed.process.kill()
    stubbed.expect("stopping")
    stubbed.wait()
    assert stubbed.left() == []
    assert not folder.exists()


STARTS = """
import signal, sys
from tests.support.terminal import Terminal
with Terminal(*sys.argv[1:], stubbed=True) as terminal:
    terminal.expect("stop with Ctrl-C")
    print(*(one.pid for one in [terminal.process, *terminal.remember()]), flush=True)
    signal.pause()
"""


def test_a_deployment_that_a_test_started_ends_with_a_test_run_that_is_killed() -> None:
    arguments = ["serve", stub_child.READY, "--port", str(claim_port("127.0.0.1", 0))]
    run = subprocess.Popen(
        [sys.executable, "-c", STARTS, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    started = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
    assert len(started) > 8
    run.kill()
    run.wait()
    run.stdout.close()
    _, alive = psutil.wait_procs(started, timeout=90)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (
            stub_child.REFUSE,
            [
                "error: the model does not fit",
                "  why: needs 9 GiB",
                "       has 1 GiB",
                "  fix: a smaller one",
            ],
        ),
        (
            stub_child.SILENT,
            ["ended while starting", "killed by SIGKILL, 3 times", "Segmentation fault in the tests"],
        ),
    ],
)
def test_a_part_that_fails_at_start_is_reported_and_everything_ends(does: str, said: list[str]) -> None:
    with Terminal("serve", does, "--port", str(claim_port("127.0.0.1", 0)), stubbed=True) as terminal:
        terminal.expect("error: ")
        assert terminal.wait() == 1
        lines = terminal.lines[terminal.lines.index(terminal.expect("error: ")) :]
        assert all(any(words in line for line in lines) for words in said) and len(lines) <= 6
        assert terminal.left() == []


def test_ctrl_c_while_starting_ends_with_130(tmp_path: Path) -> None:
    with Terminal(
        "serve", stub_child.READY, "--port", str(claim_port("127.0.0.1", 0)), stubbed=True
    ) as terminal:
        terminal.expect("diptych ")
        assert terminal.interrupt() == 130
        assert terminal.left() == []
