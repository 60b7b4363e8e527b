"""`diptych serve --ray-address`: joins a Ray cluster, checks its nodes, and brings the deployment up on them."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import structs

from diptych.config.load import ApiKeys, LoadedConfig
from diptych.errors import ConfigError, DiptychError, StartError
from diptych.specs import GPU_DEVICES, WorkerSpec
from services.cli.serve.cluster.cluster_settings import (
    check_channel_host,
    check_given_keys,
    cluster_groups,
    pinned_question_model,
    split_channel,
    state_folder,
)
from services.cli.serve.launch import ServeRun
from services.cli.serve.offload_plan import needs_weights
from services.cli.serve.specs import device_budget, devices_by_worker, num_probed
from services.cluster.capacity import (
    NodeCapacity,
    copy_nodes,
    count_devices,
    max_sharing,
    min_cpus,
    place_groups,
)
from services.cluster.daemon_calls import await_daemon
from services.cluster.join import head_is_open
from services.cluster.joined_cluster import JoinedCluster
from services.cluster.joined_deployment import ClusterDeployment
from services.cluster.local_deployment import LocalDeployment
from services.cluster.node_probe import NodeReport, check_models, check_versions, describe_warnings
from services.cluster.spec import Bundle, ClusterSpec, DeploymentSpec
from services.host.model_probe import ProbedModel, probe_request, resolve_model
from services.host.ports import claim_port, format_channel
from services.host.supervision.supervisor import ChildStatus, start_error
from services.host.versions import installed_version

# Seconds for which nodes should go on without Ray's head. By default they end after 60 s.
MIN_RECONNECT_S = 3600.0
# Seconds in which nodes must tell their versions.
VERSION_TIMEOUT_S = 30.0
# Seconds before the end of --start-timeout-s at which nodes give up looking for the model.
ERROR_TIME_S = 5.0
CHANNEL_FILE = "channel"
OPEN_CLUSTER = (
    "whoever reaches this Ray cluster may run programs on its nodes, and so read keys and prompts: start Ray with"
    " RAY_AUTH_MODE=token"
)


class ClusterRun(ServeRun):
    """One run of `diptych serve` in a Ray cluster."""

    # What is set when the cluster is joined, in this order.
    _joined: JoinedCluster | None = None
    _state: Path | None = None
    _bundle_groups: tuple[tuple[Bundle, ...], ...] = ()
    _question: str = ""
    _began_s: float = 0.0
    # Whether the replanner's budget is the cluster, whose size changes with its nodes.
    _may_use_all: bool = False

    @property
    def _cluster(self) -> JoinedCluster:
        """The cluster, which is joined before anything else."""
        assert self._joined is not None
        return self._joined

    async def _find_and_start(
        self, port: int, keys: ApiKeys
    ) -> tuple[LocalDeployment, DeploymentSpec, ProbedModel]:
        """Join the cluster, see that it has room and that its nodes have versions and model, and start the gateway."""
        self._began_s = time.monotonic()
        check_given_keys(self._config)
        nodes = await self._join_cluster()
        if self._config.channel is not None:
            check_channel_host(
                self._config.channel, self._cluster.own_address, [node.address for node in nodes]
            )
        await await_daemon(lambda: self._fit_to_cluster(nodes))
        self._view.begin_phase("model")
        model = await self._find_model()
        fitted = await await_daemon(lambda: self._check_nodes(nodes, model))
        return self._start_gateway(fitted, port, keys)

    async def _find_model(self) -> ProbedModel:
        """The model on this machine, which needs weights only to compare a calibration with them."""
        return await resolve_model(self._config, 0, bulk_weights=needs_weights(self._config))

    async def _join_cluster(self) -> Sequence[NodeCapacity]:
        """Join the cluster, beside the event loop; returns its nodes."""
        self._view.begin_phase("ray")
        assert self._config.ray_address is not None
        self._joined = JoinedCluster(self._config.ray_address, self._config.ray_namespace)
        await await_daemon(self._cluster.start)
        # Repeated, in case Ray has installed handlers of its own.
        self._stop.listen_signals()
        self._state = state_folder(self._config, self._cluster.address)
        joined = f"joined {self._cluster.address}, namespace {self._config.ray_namespace}"
        self._view.end_phase("ray", joined)
        if await await_daemon(lambda: head_is_open(self._cluster.address)):
            self._view.print_line(OPEN_CLUSTER)
        return await await_daemon(self._cluster.list_nodes)

    def _fit_to_cluster(self, nodes: Sequence[NodeCapacity]) -> None:
        """Decide what each worker takes, see that there is room for all, and let the cluster be the replanner's budget;
        blocks while Ray does not answer.

        Raises:
            StartError: there is no room for a worker.
        """
        self._bundle_groups = cluster_groups(self._config, self._plan)
        if self._config.replan and self._config.replan_budget is None:
            smallest = min(
                (bundle for bundles in self._bundle_groups for bundle in bundles),
                key=lambda bundle: bundle.devices,
            )
            held = sum(devices_by_worker(self._config).values())
            budget = max(held, count_devices(nodes, smallest.demand, smallest.devices))
            self._config = self._config.model_copy(update={"replan_budget": budget})
            self._loaded = LoadedConfig(self._config, self._loaded.origins)
            self._may_use_all = True
            self._view.print_line(f"replan: the budget is the cluster's {budget} devices")
        if not self._cluster.has_workers():
            # Workers of an earlier start are adopted, and hold their places already.
            freed = self._cluster.groups.remove_leftovers()
            place_groups(
                self._bundle_groups,
                self._cluster.await_room(self._bundle_groups) if freed else copy_nodes(nodes),
            )

    def _check_nodes(self, nodes: Sequence[NodeCapacity], model: ProbedModel) -> ProbedModel:
        """See that all nodes on which a worker may be placed have the same versions, and the model; blocks.

        Returns the model with the KV pool that every worker has at least, with which the replanner reckons.

        Raises:
            StartError: a node has another version, or does not answer.
            ModelError: a node has not the model, or no memory for it.
        """
        name, revision = pinned_question_model(self._config, model.path)
        # Workers that were asked something else are not adopted. A cluster that has grown is no reason for that.
        num_workers = 0 if self._may_use_all else num_probed(self._config)
        probe = structs.replace(probe_request(self._config, num_workers), model=name, revision=revision)
        sharing = max_sharing(self._bundle_groups)
        if probe.gpu is not None:
            probe = structs.replace(probe, gpu=structs.replace(probe.gpu, workers=sharing))
        if probe.vllm is not None:
            probe = structs.replace(probe, vllm=structs.replace(probe.vllm, workers=sharing))
        self._question = msgspec.json.encode(probe).decode()
        able = [
            node
            for node in nodes
            if any(node.could_hold(bundle.demand) for bundles in self._bundle_groups for bundle in bundles)
        ]
        reports = self._probe_nodes(able, "", VERSION_TIMEOUT_S)
        check_versions(
            reports,
            {
                "diptych": installed_version("diptych"),
                "python": platform.python_version(),
                "ray": installed_version("ray"),
            },
        )
        for line in describe_warnings(reports, MIN_RECONNECT_S):
            self._view.print_line(line)
        # The nodes' errors say more than that of a start that has taken too long.
        left_s = self._config.start_timeout_s - (time.monotonic() - self._began_s) - ERROR_TIME_S
        reports = self._probe_nodes(able, self._question, max(1.0, left_s))
        check_models(reports, self._config.model)
        return structs.replace(model, kv_bytes=min((report.kv_bytes for report in reports), default=0))

    def _probe_nodes(
        self, nodes: Sequence[NodeCapacity], question: str, timeout_s: float
    ) -> list[NodeReport]:
        workers, say = num_probed(self._config), self._view.print_line
        return self._cluster.probe_nodes(
            nodes, question, workers, min_cpus(self._bundle_groups), timeout_s, say
        )

    async def _start_placed(self, deployment: LocalDeployment) -> None:
        assert isinstance(deployment, ClusterDeployment)
        await deployment.start_workers(self._cluster)

    def _make_deployment(self, spec: DeploymentSpec) -> tuple[LocalDeployment, DeploymentSpec]:
        """The deployment in the cluster: its channel is at this machine's address there."""
        config = self._config
        assert self._state is not None
        keys_dir = str(config.keys_dir.absolute() if config.keys_dir else self._state / "keys")
        channel = self._claim_channel()
        spec = replace(
            spec,
            workers=tuple(_without_machine(worker, channel) for worker in spec.workers),
            gateway=structs.replace(spec.gateway, channel=channel, keys_dir=keys_dir),
            node_groups=self._bundle_groups,
            device_budget=device_budget(config),
        )
        cluster_spec = ClusterSpec(
            namespace=config.ray_namespace,
            question=self._question,
            max_workers=num_probed(config),
            node_keys_dir=str(config.keys_dir.absolute()) if config.keys_dir else "",
            pin_cores=config.pin_cores and config.device not in GPU_DEVICES,
        )
        made = ClusterDeployment(spec, cluster_spec, self._cluster, self._on_status, self._view.print_line)
        return made, spec

    def _claim_channel(self) -> str:
        """The address of the gateway's channel: as set, or that of the last start if its port is free, or a new one.

        Raises:
            StartError: it cannot be listened on, or the state folder cannot be written.
        """
        if self._config.channel is not None:
            host, port = split_channel(self._config.channel)
            origin = self._loaded.origin_of("channel")
            return format_channel(host, claim_port(host, port, origin, channel=True))
        assert self._state is not None
        kept, own = self._state / CHANNEL_FILE, self._cluster.own_address
        try:
            self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
            channel = self._claim_again(kept, own) or format_channel(own, claim_port(own, 0, channel=True))
            kept.write_text(channel, encoding="ascii")
        except OSError as error:
            raise StartError(
                f"{self._state} cannot be written",
                f"it keeps this deployment's keys and channel for its next start: {error.strerror}",
                "set XDG_STATE_HOME to a folder of this user",
            ) from None
        return channel

    def _claim_again(self, kept: Path, own: str) -> str:
        """The channel in the file `kept`, of the last start; empty if there is none at this address, or it is taken."""
        if not kept.exists():
            return ""
        try:
            before = kept.read_text(encoding="ascii").strip()
            host, port = split_channel(before)
            if host == own:
                claim_port(host, port, str(kept), channel=True)
                return before
        except (ConfigError, UnicodeDecodeError):
            # The file is damaged.
            pass
        except StartError as error:
            self._view.print_line(
                f"{error.what} ({error.why}): workers of the last start, which connect to it, are started anew"
            )
        return ""

    def _describe_places(self, deployment: LocalDeployment) -> list[str]:
        assert isinstance(deployment, ClusterDeployment)
        return deployment.describe_places()

    def _failure_error(self, status: ChildStatus) -> DiptychError:
        handle = self._deployment.workers.get(status.name) if self._deployment else None
        error = start_error(status, None if handle else self._logs / f"{status.name}.log")
        where = f"{getattr(handle, 'log_file', '')} on the node {getattr(handle, 'address', '')}"
        return StartError(error.what, error.why, error.fix or f"see {where}") if handle else error

    def _stop_ray(self) -> None:
        """End workers that are left after a second Ctrl-C, and leave the cluster."""
        if isinstance(self._deployment, ClusterDeployment):
            # Otherwise workers of an earlier start may be left, which the next one adopts if it has their keys.
            all_known = self._deployment.has_taken_over
            self._deployment.end_at_once()
            if all_known and self._state is not None:
                shutil.rmtree(self._state, ignore_errors=True)
        if self._joined is not None:
            self._joined.stop()


def _without_machine(spec: WorkerSpec, channel: str) -> WorkerSpec:
    """A worker's specification without what it learns from its node."""
    return structs.replace(spec, gateway=channel, keys_dir="", model="", core=None, kv_bytes=0, host="")
