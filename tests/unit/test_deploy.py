"""What is deployed: the compose file against our own command line, the image's recipe, the Makefile, and the pins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from diptych.channel.keys import load_server_keys, load_transfer_key, load_worker_keys
from diptych.config.fields import list_settings
from diptych.config.load import load_config
from diptych.config.options import Config
from diptych.errors import ModelError
from services.cli.main import main
from services.cli.serve import standalone
from services.host.exit_codes import FAILED

ROOT = Path(__file__).parents[2]
PARTS = ("gateway", "prefill", "decode")
MONITORS = ("prometheus", "alertmanager", "grafana")
PACKAGES = sorted(
    path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("tests", "benchmarks")
)


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


@pytest.fixture(scope="module")
def recipe() -> str:
    return (ROOT / "deploy" / "Dockerfile").read_text()


def test_compose_has_both_pools_a_gateway_and_keys_made_first(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"keys", *PARTS, *MONITORS}
    made = {"condition": "service_completed_successfully"}
    assert all(services[name]["depends_on"]["keys"] == made for name in ("gateway", "prefill", "decode"))
    assert all((ROOT / services[name]["build"]["dockerfile"]).is_file() for name in ("keys", *PARTS))
    named = {volume for one in services.values() for volume in mounts(one).values()}
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
    assert loaded.config.model == "tiny" and loaded.config.keys_dir == Path("/keys")
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


def test_every_volume_belongs_to_the_user_that_the_image_runs_as(
    compose: dict[str, Any], recipe: str
) -> None:
    (user,) = re.findall(r"^USER (.*)$", recipe, re.MULTILINE)
    assert user.isdecimal() and f"--uid {user} " in recipe
    (made,) = re.findall(rf"install -d -o {user} -g {user} -m 0700 \\\n([^\n]*)\n", recipe)
    folders = {folder for name in ("keys", *PARTS) for folder in mounts(compose["services"][name])}
    assert folders <= set(made.split())
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
    words = [str(volumes.get(word, word)) for word in services["keys"]["command"]]
    for _ in range(2):  # also when the volumes are not new
        monkeypatch.setattr(sys, "argv", ["diptych", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
    seen = {name: tmp_path / mounts(services[name])["/keys"] for name in PARTS}
    load_server_keys(seen["gateway"])
    for name in ("prefill", "decode"):
        load_worker_keys(seen[name])
        assert load_transfer_key(seen[name]) == load_transfer_key(seen["gateway"])
        assert not (seen[name] / "server.secret").exists() and seen[name] != seen["gateway"]
        assert set(mounts(services[name]).values()) & set(mounts(services["gateway"]).values()) == {"models"}


def test_the_api_key_is_a_file_of_the_gateway_that_only_up_asks_for(
    compose: dict[str, Any], recipe: str
) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert ":?" not in text, "what every command of compose would ask for"
    named = {
        name: {"environment": f"DIPTYCH_{name.upper().replace('-', '_')}"} for name in compose["secrets"]
    }
    assert compose["secrets"] == named and set(named) == {"api-key", "metrics-key"}, "never a key of our own"
    (secret,) = compose["services"]["gateway"]["secrets"]
    environ = environ_of(compose["services"]["gateway"])
    assert environ["DIPTYCH_API_KEY_FILE"] == f"/run/secrets/{secret['source']}"
    assert f"\nUSER {secret['uid']}\n" in recipe and secret["mode"] == 0o400
    for one in compose["services"].values():
        assert "DIPTYCH_API_KEY" not in one.get("environment", {})
    held = {
        name: one["secrets"][0]["source"] for name, one in compose["services"].items() if "secrets" in one
    }
    assert held == {"gateway": "api-key", "prometheus": "metrics-key"}


def test_compose_says_healthy_only_when_a_canary_came_through(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    assert '"http://127.0.0.1:8000/ready"' in gateway["healthcheck"]["test"][-1]
    compile(gateway["healthcheck"]["test"][-1], "healthcheck", "exec")
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
    (secret,) = services["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret['source']}"
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


def test_the_image_takes_all_packages_and_pins(recipe: str) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(PACKAGES) <= sent
    assert "PIP_CONSTRAINT=/src/constraints.txt" in recipe
    assert 'ENTRYPOINT ["diptych"]' in recipe


def test_every_package_is_built_and_has_import_contracts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert sorted(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == PACKAGES
    contracts = (ROOT / ".importlinter").read_text()
    roots = contracts.split("root_packages =")[1].split("include_external")[0].split()
    assert sorted([*roots, "models"]) == PACKAGES


def test_every_requirement_is_pinned_and_torch_without_a_local_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    assert all(re.fullmatch(r"[0-9][0-9A-Za-z.]*", version) for version in pins.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += project["project"]["optional-dependencies"]["test"]
    known = {name.lower().replace("_", "-") for name in pins}
    names = [re.split(r"[\[<>=;! ]", requirement)[0].lower().replace("_", "-") for requirement in wanted]
    assert [name for name in names if name not in known] == []


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
