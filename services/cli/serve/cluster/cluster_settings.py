"""The settings of a deployment in a Ray cluster: whether they make sense, and what each worker takes of a node."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from diptych.channel.keys import KEY_FILES, load_server_keys, load_transfer_key, load_worker_keys
from diptych.config.load import LoadedConfig
from diptych.config.options import Config
from diptych.errors import ConfigError
from engine.model.checkpoint import is_folder_name
from planner.placement.plan_file import PlanFile
from services.cli.serve.from_plan import node_groups, one_group_per_worker
from services.cli.serve.specs import devices_by_worker
from services.cluster.spec import Bundle
from services.host.model_probe import EMBEDDED_MODEL
from services.host.ports import format_channel

CLUSTER_SETTINGS = ("ray_namespace", "prefill_resources", "decode_resources", "channel", "keys_dir")
NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_cluster_settings(loaded: LoadedConfig) -> None:
    """Check the settings of a cluster at every start.

    Raises:
        ConfigError: one is given without --ray-address, or is malformed.
    """
    config, origins = loaded.config, loaded.origins
    idle = [name for name in CLUSTER_SETTINGS if name in origins]
    if config.ray_address is None:
        if idle:
            raise ConfigError(
                f"{origins[idle[0]]} has no effect",
                "without --ray-address all workers run on this machine, under a Ray of their own",
                "add --ray-address auto|HOST:PORT, or leave it out",
            )
        return
    if not NAMESPACE.fullmatch(config.ray_namespace):
        raise ConfigError(
            f"--ray-namespace {config.ray_namespace} is no name",
            "it may have letters, digits, '.', '_' and '-', 63 in all, and begins with a letter or digit",
        )
    if (config.colocated or config.bulk) and config.prefill_resources:
        kind = "bulk" if config.bulk else "colocated"
        raise ConfigError(
            f"{loaded.origin_of('prefill_resources')} has no effect",
            f"a deployment of {kind} workers has no prefill workers",
            f"--decode-resources is for {kind} workers",
        )
    if config.bulk and (config.bulk_memory_bytes is None or config.bulk_disk_bytes is None):
        raise ConfigError(
            "bulk workers in a Ray cluster need --bulk-memory-bytes and --bulk-disk-bytes",
            "what is free on this machine says nothing of the nodes",
            "give what each worker may take of its node, for example 8GiB and 100GiB",
        )
    for role in ("prefill", "decode"):
        parse_resources(config, role)
    if config.channel is not None:
        host, _ = split_channel(config.channel)
        if host == "*" or _has(host, "is_unspecified"):
            raise ConfigError(
                f"--channel {config.channel} names no machine",
                f"workers on the nodes connect to it, and {host} means every address of the machine that listens",
                "name this machine's address in the cluster, or leave it out",
            )


def split_channel(channel: str) -> tuple[str, int]:
    """Host and port of a channel's address. Raises ConfigError if it is not tcp://HOST:PORT."""
    parts = urlsplit(channel)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "tcp" or not host or port is None or parts.path:
        raise ConfigError(
            f"--channel {channel} is no address of a channel",
            "workers on the nodes connect to it; it has the form tcp://HOST:PORT",
            "leave it out: then it is this machine's address in the cluster, and a free port",
        )
    return host, port


def check_channel_host(channel: str, own: str, nodes: Sequence[str]) -> None:
    """Check that workers on the nodes with these addresses reach a channel on this machine, whose address is `own`.

    Raises:
        ConfigError: it is a loopback address, and there are other machines.
    """
    host, _ = split_channel(channel)
    others = sorted({address for address in nodes if address != own})
    if others and _has(_first_address(host), "is_loopback"):
        raise ConfigError(
            f"--channel {channel} is only reached from this machine",
            f"workers on the node {others[0]} connect to it too",
            f"--channel {format_channel(own, split_channel(channel)[1])}, or leave it out",
        )


def _first_address(host: str) -> str:
    """The address on which a channel with this host listens; the host itself if it is not known."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host


def _has(host: str, trait: str) -> bool:
    """Whether `host` is an IP address with this property of `ipaddress.IPv4Address`."""
    try:
        return bool(getattr(ipaddress.ip_address(host), trait))
    except ValueError:
        return False


def parse_resources(config: Config, role: str) -> dict[str, float]:
    """The Ray resources that the user names for workers of a role. Raises ConfigError if one is malformed."""
    entries: Sequence[str] = config.prefill_resources if role == "prefill" else config.decode_resources
    found: dict[str, float] = {}
    for entry in entries:
        name, _, amount = entry.rpartition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            found[""] = 0.0
        if "" in found or not all(0 < value < math.inf for value in found.values()):
            raise ConfigError(
                f"--{role}-resources {entry} names no resource",
                "it is NAME=AMOUNT, with the name of a Ray resource and a number above 0",
                f"for example --{role}-resources CPU=2,accelerator_type:L4=0.001",
            )
    _check_amounts(role, found)
    return found


def _check_amounts(role: str, amounts: Mapping[str, float]) -> None:
    """Raises ConfigError if Ray would refuse to reserve such an amount."""
    for name, amount in amounts.items():
        why = ""
        if name == "object_store_memory":
            why = "Ray's object store cannot be reserved, and workers do not use it"
        elif round(amount, 4) != amount:
            why = "Ray counts in steps of 0.0001"
        elif name == "GPU" and amount > 1 and not amount.is_integer():
            why = "Ray gives more than one GPU only as a whole number"
        if why:
            raise ConfigError(
                f"--{role}-resources {name}={amount:g} cannot be asked of Ray",
                why,
                "ask for another amount, or leave it out",
            )


def check_given_keys(config: Config) -> None:
    """Check the keys in --keys-dir, if it is given: they are the user's, and are never made or changed here.

    Raises:
        ConfigError: a key is missing, unreadable, open to others or malformed.
    """
    if config.keys_dir is None:
        return
    try:
        load_server_keys(config.keys_dir)
        load_worker_keys(config.keys_dir)
        load_transfer_key(config.keys_dir)
    except ConfigError as error:
        if any((config.keys_dir / name).exists() for name in KEY_FILES if name != "server.secret"):
            fix = f"copy the gateway's keys into {config.keys_dir} on this machine"
        else:
            fix = f"make them: diptych keys {config.keys_dir} --workers DIR, and copy DIR to each node"
        missing = isinstance(error.__cause__, FileNotFoundError)
        raise ConfigError(error.what, error.why, fix if missing else error.fix) from None


def cluster_groups(config: Config, plan: PlanFile | None) -> tuple[tuple[Bundle, ...], ...]:
    """What must be on one node, by the plan if there is one, with the Ray resources that each worker takes.

    A worker takes a CPU for each thread of each device; with --device cuda a GPU for each device, and a CPU.
    """
    bundle_groups = one_group_per_worker(devices_by_worker(config)) if plan is None else node_groups(plan)
    return tuple(tuple(_with_resources(bundle, config) for bundle in bundles) for bundles in bundle_groups)


def _with_resources(bundle: Bundle, config: Config) -> Bundle:
    role = bundle.worker.rsplit("-", 1)[0]
    given: dict[str, float] = {"CPU": float(bundle.devices * config.threads)}
    if config.device == "cuda":
        given = {"CPU": 1.0, "GPU": float(bundle.devices)}
    return replace(bundle, resources=tuple((given | parse_resources(config, role)).items()))


def state_folder(config: Config, address: str) -> Path:
    """The folder that keeps keys and channel of a deployment, with which its next start can adopt its workers."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "diptych" / f"{config.ray_namespace}@{address.replace(':', '_')}"


def pinned_question_model(config: Config, path: str) -> tuple[str, str | None]:
    """The model as the nodes look for it: a hub model by its id and the commit that was found here, at `path`; a folder
    by its absolute path, in which links are kept: they may lead elsewhere on the nodes.
    """
    if config.model == EMBEDDED_MODEL:
        return config.model, config.revision
    if is_folder_name(config.model):
        return str(Path(config.model).expanduser().absolute()), None
    return config.model, Path(path).name
