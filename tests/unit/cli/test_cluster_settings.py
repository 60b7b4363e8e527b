"""The settings of a Ray cluster: what is refused, and what each worker takes of a node."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from diptych.channel.keys import make_keys
from diptych.config.load import LoadedConfig
from diptych.config.options import Config
from diptych.errors import ConfigError
from services.cli.serve.cluster.cluster_settings import (
    check_channel_host,
    check_cluster_settings,
    check_given_keys,
    cluster_groups,
    pinned_question_model,
    split_channel,
    state_folder,
)
from services.host.ports import format_channel


def loaded(**settings: Any) -> LoadedConfig:
    flags = {name: "--" + name.replace("_", "-") for name in settings}
    return LoadedConfig(Config(**settings), flags)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ray_namespace": "two"}, "--ray-namespace has no effect"),
        ({"keys_dir": Path("/k")}, "--keys-dir has no effect"),
        ({"ray_address": "auto", "ray_namespace": "a b"}, "is no name"),
        ({"ray_address": "auto", "decode_resources": ("fast",)}, "names no resource"),
        ({"ray_address": "auto", "decode_resources": ("fast=0",)}, "names no resource"),
        ({"ray_address": "auto", "decode_resources": ("object_store_memory=1",)}, "cannot be asked of Ray"),
        ({"ray_address": "auto", "decode_resources": ("x=0.00001",)}, "cannot be asked of Ray"),
        ({"ray_address": "auto", "decode_resources": ("GPU=1.5",)}, "cannot be asked of Ray"),
        ({"ray_address": "auto", "prefill_resources": ("=1",)}, "names no resource"),
        ({"ray_address": "auto", "colocated": 2, "prefill_resources": ("x=1",)}, "has no effect"),
        ({"ray_address": "auto", "bulk": 2, "prefill_resources": ("x=1",)}, "has no effect"),
        ({"ray_address": "auto", "bulk": 2}, "need --bulk-memory-bytes and --bulk-disk-bytes"),
        ({"ray_address": "auto", "bulk": 2, "bulk_memory_bytes": 1 << 30}, "need --bulk-memory-bytes"),
        ({"ray_address": "auto", "channel": "tcp://host"}, "no address of a channel"),
        ({"ray_address": "auto", "channel": "ipc:///tmp/x"}, "no address of a channel"),
        ({"ray_address": "auto", "channel": "tcp://0.0.0.0:5700"}, "names no machine"),
        ({"ray_address": "auto", "channel": "tcp://*:5700"}, "names no machine"),
        ({"ray_address": "auto", "channel": "tcp://[::]:5700"}, "names no machine"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_cluster_settings(loaded(**settings))
    assert len(caught.value.lines()) <= 6


def test_sound_settings_pass() -> None:
    check_cluster_settings(loaded())
    check_cluster_settings(
        loaded(ray_address="auto", ray_namespace="team-a", decode_resources=("GPU=1", "x=0.1"))
    )
    check_cluster_settings(
        loaded(ray_address="auto", bulk=2, bulk_memory_bytes=1 << 30, bulk_disk_bytes=1 << 30)
    )
    assert split_channel("tcp://10.0.0.1:9000") == ("10.0.0.1", 9000)
    assert format_channel(*split_channel("tcp://[fd00::1]:9000")) == "tcp://[fd00::1]:9000"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_a_channel_that_other_nodes_do_not_reach_is_refused(host: str) -> None:
    channel = f"tcp://{host}:9000"
    check_channel_host(channel, "10.0.0.1", ["10.0.0.1"])
    check_channel_host("tcp://10.0.0.9:9000", "10.0.0.1", ["10.0.0.1", "10.0.0.2"])
    with pytest.raises(ConfigError, match="only reached from this machine") as caught:
        check_channel_host(channel, "10.0.0.1", ["10.0.0.1", "10.0.0.2"])
    assert "10.0.0.2" in caught.value.why and "--channel tcp://10.0.0.1:9000" in caught.value.fix


def test_workers_take_what_they_compute_on_and_what_the_user_names() -> None:
    config = Config(prefill=1, decode=1, decode_tp=2, threads=2, decode_resources=("fast=1", "CPU=8"))
    (prefill,), (decode,) = cluster_groups(config, None)
    assert prefill.demand == {"CPU": 2.0} and decode.demand == {"CPU": 8.0, "fast": 1.0}
    (prefill,), (decode,) = cluster_groups(Config(decode_tp=2, device="cuda"), None)
    assert prefill.demand == {"CPU": 1.0, "GPU": 1.0} and decode.demand == {"CPU": 1.0, "GPU": 2.0}


def test_nodes_look_for_the_same_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = "/cache/models--org--m/snapshots/0123abcd"
    assert pinned_question_model(Config(model="org/m", revision="main"), found) == ("org/m", "0123abcd")
    assert pinned_question_model(Config(), "/site-packages/models/tiny") == ("tiny", None)
    # A folder is the one that was named, also in the cache of the hub; where a link leads, the nodes find themselves.
    (tmp_path / "snapshots" / "0123").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "snapshots" / "0123")
    monkeypatch.chdir(tmp_path)
    for name in ("snapshots/0123", "./linked", str(tmp_path / "linked")):
        asked = pinned_question_model(Config(model=name), str(tmp_path / "snapshots" / "0123"))
        assert asked == (str(tmp_path / name), None)


def test_a_name_that_means_this_machine_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's own name of a machine, 127.0.1.1."""
    addresses = {"me": "127.0.1.1", "me.lan": "10.0.0.1"}

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (addresses[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    check_channel_host("tcp://me.lan:9000", "10.0.0.1", ["10.0.0.1", "10.0.0.2"])
    with pytest.raises(ConfigError, match="only reached from this machine"):
        check_channel_host("tcp://me:9000", "10.0.0.1", ["10.0.0.1", "10.0.0.2"])


def test_keys_that_are_given_must_be_there(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    config = Config(keys_dir=keys)
    with pytest.raises(ConfigError, match="server.secret cannot be read") as caught:
        check_given_keys(config)
    assert f"diptych keys {keys} --workers DIR" in caught.value.fix and not keys.exists()
    make_keys(keys)
    check_given_keys(config)
    check_given_keys(Config())
    # What the nodes have.
    (keys / "server.secret").unlink()
    before = {path.name: path.read_bytes() for path in keys.iterdir()}
    with pytest.raises(ConfigError, match="server.secret cannot be read") as caught:
        check_given_keys(config)
    assert "copy the gateway's keys" in caught.value.fix
    assert {path.name: path.read_bytes() for path in keys.iterdir()} == before


def test_each_deployment_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_folder(Config(ray_namespace="a"), "10.0.0.1:6379") == Path("/state/diptych/a@10.0.0.1_6379")
