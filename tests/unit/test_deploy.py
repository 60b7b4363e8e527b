"""What is deployed: the compose file against our own command line, the image's recipe, the Makefile, and the pins."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from diptych.channel.keys import load_server_keys, load_transfer_key, load_worker_keys
from diptych.config.fields import list_settings
from diptych.config.load import collect_api_keys, load_config, with_operator_keys
from diptych.config.options import Config
from diptych.errors import ModelError
from engine.model.checkpoint import Checkpoint
from services.cli.main import main
from services.cli.serve import standalone
from services.host import channel_probe, model_probe
from services.host.exit_codes import FAILED

ROOT = Path(__file__).parents[2]
PARTS = ("gateway", "prefill", "decode")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGE = f"diptych:{VERSION}"
MONITORS = ("prometheus", "alertmanager", "grafana")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return content


def filled(value: str) -> str:
    """A compose value with `${NAME:-default}` replaced, as where the user sets none of these names."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", lambda match: match[1], value)


def environ_of(service: dict[str, Any]) -> dict[str, str]:
    return {key: filled(str(value)) for key, value in service["environment"].items()}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Volume by folder in the container."""
    return {folder: volume for volume, folder in (filled(one).split(":")[:2] for one in service["volumes"])}


def mounts_or_none(service: dict[str, Any]) -> dict[str, str]:
    return mounts(service) if "volumes" in service else {}


@pytest.fixture(scope="module")
def recipe() -> str:
    return (ROOT / "deploy" / "Dockerfile").read_text()


def test_compose_has_both_pools_a_gateway_and_keys_made_first(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"keys", "processes", *PARTS, *MONITORS}
    made = {"condition": "service_completed_successfully"}
    assert all(services[name]["depends_on"]["keys"] == made for name in ("gateway", "prefill", "decode"))
    assert [name for name, one in services.items() if "build" in one] == ["keys"], "one build, one image"
    assert (ROOT / services["keys"]["build"]["dockerfile"]).is_file()
    assert {services[name]["image"] for name in ("keys", "processes", *PARTS)} == {IMAGE}
    named = {volume for one in services.values() if "volumes" in one for volume in mounts(one).values()}
    assert {volume for volume in named if "/" not in volume} == set(compose["volumes"])
    assert not any("shm_size" in one for one in services.values()), "it bounds nothing that is used"


@pytest.mark.parametrize("name", PARTS)
def test_our_command_line_takes_what_compose_gives(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    command, *rest = service["command"]
    environ = environ_of(service)
    ours = {one.env for one in list_settings(Config)} | {"DIPTYCH_CONFIG"}
    assert {key for key in environ if key.startswith("DIPTYCH_")} <= ours
    loaded = load_config(command, {"role": rest[0]} if rest else {}, environ)
    assert loaded.config.model == "tiny" and str(loaded.config.keys_dir) in mounts(service)
    assert (loaded.config.role or "gateway") == name
    assert loaded.config.slo_ttft_ms is None and loaded.config.kv_cache_memory_bytes is None


@pytest.mark.parametrize("name", PARTS)
def test_objectives_and_memory_can_be_set_from_outside(compose: dict[str, Any], name: str) -> None:
    wanted = {"DIPTYCH_SLO_TTFT_MS": "500", "DIPTYCH_SLO_TPOT_MS": "50"}
    if name != "gateway":
        wanted["DIPTYCH_KV_CACHE_MEMORY_BYTES"] = "2GiB"
    given = compose["services"][name]["environment"]
    assert {key: given[key] for key in wanted} == {key: f"${{{key}:-}}" for key in wanted}
    command, *rest = compose["services"][name]["command"]
    config = load_config(
        command, {"role": rest[0]} if rest else {}, environ_of(compose["services"][name]) | wanted
    ).config
    assert (config.slo_ttft_ms, config.slo_tpot_ms) == (500.0, 50.0)
    assert config.kv_cache_memory_bytes == (None if name == "gateway" else 2 << 30)
    assert compose["services"][name]["env_file"] == [{"path": "diptych.env", "required": False}]


def test_workers_of_one_machine_share_its_memory(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [compose["services"][name] for name in ("prefill", "decode")]
    shares = []

    async def find(config: Config, num_workers: int) -> None:
        shares.append(num_workers)
        raise ModelError("enough is known")

    monkeypatch.setattr(standalone, "resolve_model", find)
    for one in workers:
        assert (
            standalone.run_worker(load_config("worker", {"role": one["command"][1]}, environ_of(one)))
            == FAILED
        )
    assert shares == [len(workers)] * len(workers) == [2, 2]


def test_planned_memory_is_at_most_nine_tenths_of_the_machine(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and KV of all workers that the file starts, where memory is what limits the pools."""
    machine, planned = 320 << 20, 0
    monkeypatch.setattr(model_probe, "available_memory", lambda: machine)
    files = Checkpoint.resolve(model_probe.resolve_embedded("tiny"), None)
    weights = files.memory(max_model_len=None, kv_bytes=None, available_bytes=machine).weight_bytes
    for name in ("prefill", "decode"):
        service = compose["services"][name]
        config = load_config("worker", {"role": service["command"][1]}, environ_of(service)).config
        found = asyncio.run(model_probe.resolve_model(config, config.host_workers))
        planned += found.kv_bytes + weights
    assert 0.85 * machine < planned <= 0.9 * machine


def test_every_volume_belongs_to_the_user_that_the_image_runs_as(
    compose: dict[str, Any], recipe: str
) -> None:
    (user,) = re.findall(r"^USER (.*)$", recipe, re.MULTILINE)
    assert user.isdecimal() and f"--uid {user} " in recipe
    made = re.findall(rf"install -d -o {user} -g {user} -m 07[05]0 (?:\\\n)?([^\n&]*)", recipe)
    folders = {folder for name in ("keys", *PARTS) for folder in mounts(compose["services"][name])}
    assert folders <= set(" ".join(made).split())
    kept = dict(re.findall(r"(HF_HOME|NUMBA_CACHE_DIR)=(\S+)", recipe))
    for name in ("prefill", "decode"):
        assert set(kept.values()) <= set(mounts(compose["services"][name]))
    assert kept["HF_HOME"] in mounts(compose["services"]["gateway"])


def test_workers_hold_their_own_keys_and_not_the_gateway_s(
    compose: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of the service `keys` is run, with its volumes in a folder of this test."""
    services = compose["services"]
    volumes = {folder: tmp_path / volume for folder, volume in mounts(services["keys"]).items()}
    for folder in volumes.values():
        folder.mkdir()
    words = services["keys"]["command"]
    for inside, outside in volumes.items():
        words = [word.replace(inside, str(outside)) for word in words]
    for _ in range(2):  # also when the volumes are not new
        monkeypatch.setattr(sys, "argv", ["diptych", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
    seen = {
        name: tmp_path / mounts(services[name])[environ_of(services[name])["DIPTYCH_KEYS_DIR"]]
        for name in PARTS
    }
    load_server_keys(seen["gateway"])
    for name in ("prefill", "decode"):
        load_worker_keys(seen[name])
        assert load_transfer_key(seen[name]) == load_transfer_key(seen["gateway"])
        assert not (seen[name] / "server.secret").exists() and seen[name] != seen["gateway"]
        assert set(mounts(services[name]).values()) & set(mounts(services["gateway"]).values()) == {"models"}


def test_keys_are_files_that_no_command_of_compose_asks_for(
    compose: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service `keys` makes them; the gateway reads them; Prometheus, another user, reads its own by its group."""
    text = (ROOT / "docker-compose.yml").read_text()
    services = compose["services"]
    assert ":?" not in text and "secrets" not in compose, "what `up`, `down` or `logs` would need"
    names = {name for one in services.values() for name in one.get("environment", {})}
    assert not names & {"DIPTYCH_API_KEY", "DIPTYCH_METRICS_KEY", "DIPTYCH_ADMIN_KEY", "HF_TOKEN"}
    files = {
        flag: word.partition("=")[2]
        for flag in ("--api-key-file", "--metrics-key-file", "--admin-key-file")
        for word in services["keys"]["command"]
        if word.startswith(f"{flag}=")
    }
    environ = environ_of(services["gateway"])
    named = {flag: f"DIPTYCH_{flag[2:].upper().replace('-', '_')}" for flag in files}
    assert {flag: environ[name] for flag, name in named.items()} == files
    outside = {flag: tmp_path / Path(inside).name for flag, inside in files.items()}
    words = [word for flag, file in outside.items() for word in (flag, str(file))]
    monkeypatch.setattr(sys, "argv", ["diptych", "keys", str(tmp_path / "channel"), *words])
    for _ in range(2):  # the second time they are there, and stay
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        made = [file.read_text().strip() for file in outside.values()]
        assert [stat.S_IMODE(file.stat().st_mode) for file in outside.values()] == [0o600, 0o640, 0o600]
    environ |= {named[flag]: str(file) for flag, file in outside.items()}
    loaded = with_operator_keys(load_config("gateway", {}, environ))
    read = [*collect_api_keys(loaded).every, loaded.config.metrics_key, loaded.config.admin_key]
    assert read == made and len(set(made)) == 3
    for flag in ("--api-key-file", "--admin-key-file"):
        folder = str(Path(files[flag]).parent)
        held = {name for name, one in services.items() if folder in mounts_or_none(one)}
        assert held == {"keys", "gateway"}
    metrics = files["--metrics-key-file"]
    volume = mounts(services["gateway"])[str(Path(metrics).parent)]
    assert mounts(services["prometheus"])["/run/keys"] == volume
    assert services["prometheus"]["group_add"] == ["10001"]


def test_batches_lie_in_a_volume_of_the_gateway(compose: dict[str, Any]) -> None:
    services = compose["services"]
    folder = load_config("gateway", {}, environ_of(services["gateway"])).config.data_dir
    volume = mounts(services["gateway"])[str(folder)]
    assert f"{volume}:{folder}" in services["gateway"]["volumes"], "it is written"
    assert [name for name, one in services.items() if volume in mounts_or_none(one).values()] == ["gateway"]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_drains_before_compose_kills_it(compose: dict[str, Any], name: str) -> None:
    """For as long as under systemd and Kubernetes."""
    service = compose["services"][name]
    command, *rest = service["command"]
    flags = {"role": rest[0]} if rest else {}
    grace = re.fullmatch(r"(\d+)s", filled(service["stop_grace_period"]))
    config = load_config(command, flags, environ_of(service)).config
    assert grace is not None and (config.drain_s, int(grace[1])) == (30.0, 40)
    assert service["environment"]["DIPTYCH_DRAIN_S"] == "${DIPTYCH_DRAIN_S:-30}", "it can be set from outside"


def test_roots_are_read_only_and_workers_share_a_process_name_space(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name in ("keys", "processes", *PARTS):
        assert services[name]["read_only"] is True and services[name]["cap_drop"] == ["ALL"]
        assert services[name]["tmpfs"] == ["/tmp:mode=1777,size=64m"]
    assert {name for name in services if "pid" in services[name]} == {"prefill", "decode"}
    for name in ("prefill", "decode"):
        assert services[name]["pid"] == "service:processes" and "processes" in services[name]["depends_on"]
        assert services[name]["healthcheck"]["test"] == ["CMD", "python", "-m", channel_probe.__name__]
    assert services["processes"]["init"] is True
    assert filled(services["gateway"]["mem_limit"]) == "1g"


def test_compose_says_healthy_only_when_a_canary_came_through(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    check = gateway["healthcheck"]["test"][-1]
    asking = "import urllib.request; urllib.request.urlopen = lambda url, timeout, context: print(url, bool(context))"
    asked = [
        subprocess.run(
            [sys.executable, "-c", f"{asking}\n{check}"],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for environ in ({}, {"DIPTYCH_SSL_CERTFILE": "/tls/tls.crt"})
    ]
    assert asked == [["http://127.0.0.1:8000/ready", "False"], ["https://127.0.0.1:8000/ready", "True"]]
    (port,) = gateway["ports"]
    assert filled(port) == "127.0.0.1:8000:8000"


def test_monitoring_reads_what_is_committed_and_starts_only_when_asked_for(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert [name for name, one in services.items() if one.get("profiles") == ["monitoring"]] == list(MONITORS)
    for name in MONITORS:
        assert ":latest" not in services[name]["image"] and ":" in services[name]["image"]
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])
        for where, kept in mounts(services[name]).items():
            assert not kept.startswith("./") or (ROOT / kept).exists(), where
    folder = ROOT / "deploy/monitoring"
    scraped = yaml.safe_load((folder / "prometheus.yml").read_text())
    (job,) = scraped["scrape_configs"]
    assert job["job_name"] == "diptych" and job["static_configs"] == [{"targets": ["gateway:8000"]}]
    assert job["authorization"]["credentials_file"] == "/run/keys/metrics-key"
    (rules,) = scraped["rule_files"]
    inside = mounts(services["prometheus"])
    assert (ROOT / inside[str(Path(rules).parent)] / Path(rules).name).is_file()
    (source,) = yaml.safe_load((folder / "grafana/provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    (boards,) = yaml.safe_load((folder / "grafana/provisioning/dashboards/diptych.yml").read_text())[
        "providers"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert list((ROOT / mounts(services["grafana"])[boards["options"]["path"]]).glob("*.json"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())
    settings["rule_files"] = [str(ROOT / "deploy/grafana/diptych-rules.yml")]
    key = tmp_path / "key"
    key.write_text("k" * 16)
    settings["scrape_configs"][0]["authorization"]["credentials_file"] = str(key)
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    done = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_takes_pins(recipe: str) -> None:
    assert "PIP_CONSTRAINT=/src/constraints.txt" in recipe
    assert 'ENTRYPOINT ["diptych"]' in recipe


def test_the_image_builds_from_a_folder_of_wheels_and_knows_no_second_index(recipe: str) -> None:
    assert "EXTRA_INDEX" not in recipe and "--index-url" not in recipe
    assert "\nARG PIP_NO_INDEX=" in recipe and "PIP_FIND_LINKS=/wheels" in recipe
    assert '\nARG PIP_INDEX_URL=""\n' in recipe, "pip takes no notice of an empty one"
    steps = re.findall(r"^RUN ((?:.*\\\n)*.*)$", recipe, re.MULTILINE)
    installing = [step for step in steps if "pip install" in step]
    assert len(installing) == 2
    assert all(step.startswith("--mount=type=bind,from=wheels,target=/wheels ") for step in installing)
    assert "FROM scratch AS wheels\n" in recipe, "without --build-context wheels=FOLDER there are none"
    for step in installing:
        assert "--mount=type=secret,id=ca " in step, "a certificate authority is in no layer"
        assert step.index("export PIP_CERT=/run/secrets/ca") < step.index("pip install")


def test_documents_build_the_image_that_is_deployed() -> None:
    texts = [(ROOT / name).read_text() for name in ("deploy/Dockerfile", "docs/deploying.md", "README.md")]
    named = [name for text in texts for name in re.findall(r"docker build (?:[^\n`]|\\\n)*?-t (\S+)", text)]
    assert len(named) >= 4 and set(named) == {IMAGE}


def test_the_monitoring_example_sets_what_its_rules_record(compose: dict[str, Any]) -> None:
    """Without SLOs the recording rules of attainment have no data."""
    for name in ("docker-compose.yml", "docs/dashboards.md"):
        text = (ROOT / name).read_text()
        found = re.findall(r"^(.*)docker compose --profile monitoring up --build", text, re.MULTILINE)
        assert found and {one.strip("# ") for one in found} == {
            "DIPTYCH_SLO_TTFT_MS=500 DIPTYCH_SLO_TPOT_MS=50"
        }


def test_what_the_documents_make_in_a_checkout_is_not_committed() -> None:
    """Keys, settings and wheels neither get into a commit nor into the image."""
    kept = {"wheelhouse/", "diptych.env", "keys/", "monitoring/"}
    # With a slash in front: a folder of that name elsewhere is committed (deploy/monitoring).
    assert {f"/{name}" for name in kept} <= set((ROOT / ".gitignore").read_text().splitlines())
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert sent[0] == "*" and not {f"!{name.rstrip('/')}" for name in kept} & set(sent)


def test_every_requirement_is_pinned_and_torch_without_a_local_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    assert all(re.fullmatch(r"[0-9][0-9A-Za-z.]*", version) for version in pins.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [one for extra in project["project"]["optional-dependencies"].values() for one in extra]
    known = {name.lower().replace("_", "-") for name in pins}
    names = [re.split(r"[\[<>=;! ]", requirement)[0].lower().replace("_", "-") for requirement in wanted]
    assert [name for name in names if name not in known | {"diptych"}] == []


def test_every_target_of_the_makefile_is_explained() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert [name for name in phony[1].split() if f"make {name}" not in shown] == []


def test_continuous_integration_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and "make test" in script.read_text()


@pytest.mark.parametrize("script", ["deploy/install.sh", ".ci/run"])
def test_scripts_are_valid_shell(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


# Behaves like Python while `deploy/install.sh` runs, and takes a while for pip.
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
  "-m venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip") echo "Collecting torch"; echo "  Downloading torch-2.13.0-cp311.whl (190.5 MB)"
    sleep 4; exit $PIP_STATUS ;;
esac
"""


def install(folder: Path, pip_status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the script without a terminal, with a line of progress each second."""
    python = folder / "fake-python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    env = os.environ | {"PYTHON": str(python), "WANTED": "stamp", "PIP_STATUS": str(pip_status)}
    script = str(ROOT / "deploy" / "install.sh")
    return subprocess.run([script, "1"], cwd=folder, env=env, capture_output=True, text=True)


def test_an_install_says_at_once_what_it_takes_and_then_what_it_does(tmp_path: Path) -> None:
    done = install(tmp_path)
    first, *_, last = done.stdout.splitlines()
    assert done.returncode == 0 and (tmp_path / ".venv/.installed").read_text() == "stamp\n"
    assert re.fullmatch(r"install   the first time takes about \d+ minutes: pip downloads [\d.]+ GB.*", first)
    assert re.search(r"^install +\d+ s  Downloading torch-2\.13\.0 \(190\.5 MB\)$", done.stdout, re.M)
    assert re.fullmatch(r"install   done in \d+ s, of which kernels took \d+ s; .*", last)
    again = install(tmp_path)
    assert again.returncode == 0 and "first time" not in again.stdout, "what is there is not downloaded"


def test_an_install_that_fails_shows_the_last_lines_of_pip(tmp_path: Path) -> None:
    done = install(tmp_path, pip_status=1)
    assert (
        done.returncode == 1 and "Downloading torch" in done.stderr and "pip could not install" in done.stderr
    )
    assert not (tmp_path / ".venv/.installed").exists()
