"""What is deployed: the compose file against our own command line, the image's recipe, the Makefile, and the pins."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from diptych.config import Config
from diptych.load import load
from diptych.settings import settings

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("tests", "benchmarks")
)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return content


def filled(value: str) -> str:
    """A compose value with `${NAME:-default}` and `${NAME:?told}` replaced."""
    return re.sub(r"\$\{\w+:([-?])([^}]*)\}", lambda match: match[2] if match[1] == "-" else "secret", value)


def test_compose_has_both_pools_a_gateway_and_keys_made_first(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"keys", "gateway", "prefill", "decode"}
    made = {"condition": "service_completed_successfully"}
    assert all(services[name]["depends_on"]["keys"] == made for name in ("gateway", "prefill", "decode"))
    assert all((ROOT / one["build"]["dockerfile"]).is_file() for one in services.values())
    named = {volume.split(":")[0] for one in services.values() for volume in one["volumes"]}
    assert named == set(compose["volumes"])


@pytest.mark.parametrize("name", ["gateway", "prefill", "decode"])
def test_our_command_line_takes_what_compose_gives(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    command, *rest = service["command"]
    environ = {key: filled(str(value)) for key, value in service["environment"].items()}
    ours = {one.env for one in settings(Config, command)} | {"DIPTYCH_CONFIG"}
    assert {key for key in environ if key.startswith("DIPTYCH_")} <= ours
    loaded = load(command, {"role": rest[0]} if rest else {}, environ)
    assert loaded.config.model == "tiny" and loaded.config.keys_dir == Path("/keys")
    assert (loaded.config.role or "gateway") == name


def test_compose_says_healthy_only_when_a_canary_came_through(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    assert '"http://127.0.0.1:8000/ready"' in gateway["healthcheck"]["test"][-1]
    compile(gateway["healthcheck"]["test"][-1], "healthcheck", "exec")
    (port,) = gateway["ports"]
    assert filled(port) == "127.0.0.1:8000:8000"
    assert gateway["environment"]["DIPTYCH_API_KEY"].startswith("${DIPTYCH_API_KEY:?"), (
        "never a key of our own"
    )


def test_the_image_takes_all_packages_and_pins(compose: dict[str, Any]) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(PACKAGES) <= sent
    recipe = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "PIP_CONSTRAINT=/src/constraints.txt" in recipe and "\nUSER diptych\n" in recipe
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
