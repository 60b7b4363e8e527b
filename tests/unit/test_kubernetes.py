"""What `kubectl apply -k` would send: built, loaded by our own command line, and held against the schemas.

No cluster is needed: `kubectl kustomize` builds both variants. The schema of a RayCluster is the part of
KubeRay's (1.5) that the file uses; an unknown field fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import typer
import yaml

from diptych.config.load import LoadedConfig
from services.cli.main import COMMANDS
from services.cli.serve.cluster.cluster_settings import state_folder
from services.cli.serve.settings_flags import bind_settings
from services.host import channel_probe

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VARIANTS = ("base", "ray")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which builds kustomizations, is not installed"
)
Manifest = dict[str, Any]

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
TEMPLATE = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {
        "metadata": {"type": "object", "additionalProperties": False, "properties": {"labels": TEXTS}},
        "spec": {"type": "object", "required": ["containers"]},
    },
}
GROUP = {"rayStartParams": TEXTS, "template": TEMPLATE}
RAY_CLUSTER = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "rayVersion": {"type": "string"},
        "authOptions": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"mode": {"enum": ["disabled", "token"]}},
        },
        "headGroupSpec": {
            "type": "object",
            "required": ["template"],
            "additionalProperties": False,
            "properties": GROUP,
        },
        "workerGroupSpecs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["groupName", "maxReplicas", "minReplicas", "template"],
                "additionalProperties": False,
                "properties": GROUP
                | {"groupName": {"type": "string"}}
                | {name: {"type": "integer"} for name in ("replicas", "minReplicas", "maxReplicas")},
            },
        },
    },
}


def build(folder: Path) -> list[Manifest]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return [one for one in yaml.safe_load_all(done.stdout) if one]


@pytest.fixture(scope="module", params=VARIANTS)
def built(request: pytest.FixtureRequest) -> list[Manifest]:
    return build(FOLDER / str(request.param))


def of_kind(built: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in built if one["kind"] == kind]


def pod_templates(built: list[Manifest]) -> list[Manifest]:
    found = [one["spec"]["template"] for one in of_kind(built, "Deployment")]
    for cluster in of_kind(built, "RayCluster"):
        groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
        found += [group["template"] for group in groups]
    return found


def selected(templates: list[Manifest], labels: dict[str, str]) -> list[Manifest]:
    return [one for one in templates if labels.items() <= one["metadata"]["labels"].items()]


def service_links(built: list[Manifest]) -> dict[str, str]:
    """What Kubernetes puts into the environment of every pod of a namespace, for its services."""
    found = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_PORT": "tcp://10.0.0.1:443"}
    names = [one["metadata"]["name"] for one in of_kind(built, "Service")]
    assert "diptych" in names
    for service in (*names, "diptych-decode", "diptych-prefill", "diptych-host", "diptych-model"):
        prefix, url = service.upper().replace("-", "_"), "tcp://10.0.0.9:8000"
        found |= {
            f"{prefix}_SERVICE_HOST": "10.0.0.9",
            f"{prefix}_SERVICE_PORT": "8000",
            f"{prefix}_SERVICE_PORT_HTTP": "8000",
            f"{prefix}_PORT": url,
            f"{prefix}_PORT_8000_TCP": url,
            f"{prefix}_PORT_8000_TCP_PROTO": "tcp",
            f"{prefix}_PORT_8000_TCP_PORT": "8000",
            f"{prefix}_PORT_8000_TCP_ADDR": "10.0.0.9",
        }
    return found


def environ_of(container: Manifest, built: list[Manifest]) -> dict[str, str]:
    maps = {one["metadata"]["name"]: one["data"] for one in of_kind(built, "ConfigMap")}
    environ: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        environ |= maps[source["configMapRef"]["name"]]
    fields = {"status.podIP": "127.0.0.1", "metadata.name": "diptych-decode-6d4f-x2x"}
    for one in container.get("env", ()):
        where = one.get("valueFrom", {})
        value = one.get("value") or fields.get(where.get("fieldRef", {}).get("fieldPath", ""), "a-secret")
        assert one["name"] not in environ or one["name"] == "DIPTYCH_CHANNEL"
        environ[one["name"]] = value
    return environ


def loaded(container: Manifest, environ: dict[str, str]) -> LoadedConfig:
    """The settings with which the container's command would start."""
    found: list[LoadedConfig] = []

    def take(given: LoadedConfig) -> int:
        found.append(given)
        return 0

    command, *words = container["args"]
    assert COMMANDS[command].settings
    app = typer.Typer(add_completion=False)
    place = "role" if command == "worker" else "model"
    app.command()(bind_settings(command, take, place))
    with mock.patch.dict(os.environ, environ, clear=True):
        app(words, standalone_mode=False)
    return found[0]


def test_every_container_s_settings_are_taken_by_our_command_line(built: list[Manifest]) -> None:
    links = service_links(built)
    seen = []
    for template in pod_templates(built):
        for container in template["spec"]["containers"]:
            assert container["image"] == f"diptych:{VERSION}"
            environ = environ_of(container, built)
            assert not {name for name in environ if re.search("DIPTYCH.*_KEY$|HF_TOKEN", name)}
            if "args" not in container:  # the operator writes the command: `ray start`
                assert not {name for name in environ if name.startswith("DIPTYCH_")}
                continue
            # The port is set in the gateway, and there a service of that name is overridden as Kubernetes does.
            config = loaded(container, links | environ).config
            seen.append((container["args"][0], config.role))
            assert config.model == "tiny"
            assert template["spec"]["terminationGracePeriodSeconds"] > config.drain_s + 2
            mounts = [Path(one["mountPath"]) for one in container["volumeMounts"]]
            files = (config.api_key_file, config.metrics_key_file, config.admin_key_file)
            for path in (config.keys_dir, *files):
                assert path is None or path in mounts or path.parent in mounts
            if config.role is None:
                ports = {one["name"]: one["containerPort"] for one in container["ports"]}
                assert config.port == ports["http"] and config.host == "0.0.0.0"
                assert all(files)
                assert container["lifecycle"]["preStop"]["exec"]["command"][0] == "sleep"
    wanted = [("gateway", None), ("worker", "prefill"), ("worker", "decode")]
    assert sorted(seen, key=str) in (sorted(wanted, key=str), [("serve", None)])


def test_pods_run_as_the_image_s_user_with_nothing_to_spare(built: list[Manifest]) -> None:
    (user,) = re.findall(r"^USER (\d+)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    for template in pod_templates(built):
        spec = template["spec"]
        context = spec["securityContext"]
        assert {context[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {int(user)}
        assert context["runAsNonRoot"] and not spec["automountServiceAccountToken"]
        volumes = {one["name"]: one for one in spec["volumes"]}
        used = {mount["name"] for one in spec["containers"] for mount in one["volumeMounts"]}
        assert used == volumes.keys()
        # Root's files, readable by the pod's group: what the loader of keys takes.
        assert all(one["secret"]["defaultMode"] == 0o440 for one in volumes.values() if "secret" in one)
        for container in spec["containers"]:
            limits = container["securityContext"]
            assert limits["capabilities"] == {"drop": ["ALL"]} and not limits["allowPrivilegeEscalation"]
            assert container["resources"]["limits"]["memory"] and "readinessProbe" in container


def test_services_policies_and_budgets_select_pods_that_are_there(built: list[Manifest]) -> None:
    templates = pod_templates(built)
    ports = {
        port["name"]: one
        for one in templates
        for part in one["spec"]["containers"]
        for port in part.get("ports", ())
    }
    for service in of_kind(built, "Service"):
        (pod,) = selected(templates, service["spec"]["selector"])
        assert all(ports[port["targetPort"]] is pod for port in service["spec"]["ports"])
    covered: list[Manifest] = []
    for policy in of_kind(built, "NetworkPolicy"):
        pods = selected(templates, policy["spec"]["podSelector"]["matchLabels"])
        assert pods and policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        covered += pods
    assert all(one in covered for one in templates), "a pod that everybody may reach"
    for budget in of_kind(built, "PodDisruptionBudget"):
        assert selected(templates, budget["spec"]["selector"]["matchLabels"])
        assert budget["spec"]["maxUnavailable"] == 1


def test_the_channel_is_open_to_workers_alone() -> None:
    manifests = build(FOLDER / "base")
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(manifests, "NetworkPolicy")}
    public, channel = policies["diptych-gateway"]["ingress"]
    assert public == {"ports": [{"port": "http"}]} and channel["ports"] == [{"port": "channel"}]
    (source,) = channel["from"]
    pods = selected(pod_templates(manifests), source["podSelector"]["matchLabels"])
    assert {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods} == {"prefill", "decode"}
    for pod in pods:
        (worker,) = pod["spec"]["containers"]
        assert worker["readinessProbe"]["exec"]["command"] == ["python", "-m", channel_probe.__name__]
        assert "diptych-gateway" not in str(pod["spec"]["volumes"]), "no worker holds the gateway's secret"


def test_the_ray_cluster_is_as_kuberay_s_schema_has_it() -> None:
    manifests = build(FOLDER / "ray")
    (cluster,) = of_kind(manifests, "RayCluster")
    assert cluster["apiVersion"] == "ray.io/v1"
    jsonschema.validate(cluster["spec"], RAY_CLUSTER)
    (pinned,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert cluster["spec"]["rayVersion"] == pinned
    head, driver = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    environ = {one["name"]: one for one in driver["env"]}
    # The operator names its secret after the cluster.
    assert environ["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": cluster["metadata"]["name"],
        "key": "auth_token",
    }
    assert loaded(driver, environ_of(driver, manifests)).config.ray_address == "auto"
    shared = {"/tmp/ray", "/dev/shm"}
    assert shared <= {one["mountPath"] for one in head["volumeMounts"]}
    assert shared <= {one["mountPath"] for one in driver["volumeMounts"]}, (
        "else it is no process of the head's node"
    )
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    (node,) = workers["template"]["spec"]["containers"]
    needed = environ_of(driver, manifests)
    cores = workers["replicas"] * int(node["resources"]["limits"]["cpu"])
    assert cores >= int(needed["DIPTYCH_PREFILL"]) + int(needed["DIPTYCH_DECODE"])


def test_a_driver_that_is_started_again_finds_its_keys_and_its_channel() -> None:
    """Its container's own root is new then; a volume of the pod is not. Else it could adopt no worker."""
    manifests = build(FOLDER / "ray")
    (cluster,) = of_kind(manifests, "RayCluster")
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    _, driver = pod["containers"]
    environ = environ_of(driver, manifests)
    with mock.patch.dict(os.environ, {"HOME": "/home/diptych"} | environ, clear=True):
        state = state_folder(loaded(driver, environ).config, "10.0.0.1:6379")
    (mount,) = [one for one in driver["volumeMounts"] if Path(one["mountPath"]) in state.parents]
    assert not mount.get("readOnly")
    (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
    assert volume == {"name": mount["name"], "emptyDir": {}}
    nodes = [
        *pod["containers"][:1],
        *cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"],
    ]
    assert not [one for node in nodes for one in node["volumeMounts"] if one["name"] == mount["name"]], (
        "the gateway's secret is the driver's alone"
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_lines_make_every_key_that_a_pod_reads(variant: str) -> None:
    head = (FOLDER / variant / "kustomization.yaml").read_text()
    (command,) = re.findall(r"^#     diptych keys ((?:.*\\\n)*.*)$", head, re.MULTILINE)
    made = {Path(file).name for file in re.findall(r"--[a-z-]+-file (\S+)", command)}
    named: set[str] = set()
    for template in pod_templates(build(FOLDER / variant)):
        for container in template["spec"]["containers"]:
            values = {one["name"]: one.get("value", "") for one in container.get("env", ())}
            named |= {Path(value).name for name, value in values.items() if name.endswith("_KEY_FILE")}
    assert named == made == {"api-key", "metrics-key", "admin-key"}


def test_the_pod_monitor_reads_the_gateway_with_the_key_for_metrics(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / "overlay"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text("resources: [../base]\ncomponents: [../monitoring]\n")
    manifests = build(overlay)
    (monitor,) = of_kind(manifests, "PodMonitor")
    (pod,) = selected(pod_templates(manifests), monitor["spec"]["selector"]["matchLabels"])
    (end,) = monitor["spec"]["podMetricsEndpoints"]
    (gateway,) = pod["spec"]["containers"]
    assert end["port"] in {one["name"] for one in gateway["ports"]}
    environ = environ_of(gateway, manifests)
    key = end["authorization"]["credentials"]
    assert Path(environ["DIPTYCH_METRICS_KEY_FILE"]).name == key["key"]
    secrets = {one.get("secret", {}).get("secretName") for one in pod["spec"]["volumes"]}
    assert key["name"] in secrets
