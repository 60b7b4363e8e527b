"""Settings: every one has all its names; later sources win; every mistake is told with its source and a remedy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.config import Config, GatewaySpec, WorkerSpec
from diptych.errors import ConfigError
from diptych.load import Loaded, dump, keys, load
from diptych.settings import Kind, milliseconds, seconds, settings, size, whole
from services.cli.reference import document

ROOT = Path(__file__).parents[2]


def loaded(
    command_line: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Loaded:
    return load("serve", command_line or {}, env or {}, file)


def refused(
    command_line: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
    command: str = "serve",
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(command, command_line or {}, env or {}, file)
    lines = caught.value.lines()
    assert len(lines) <= 6
    return "\n".join(lines)


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    return tmp_path / "deployment.yaml"


def test_every_setting_has_flag_yaml_environment_and_help() -> None:
    declared = settings(Config)
    assert [one.name for one in declared] == [field.name for field in dataclasses.fields(Config)]
    for one in declared:
        assert one.flag == "--" + one.name.replace("_", "-")
        assert one.env == "DIPTYCH_" + one.name.upper()
        assert 8 <= len(one.help) <= 60 and one.help[0].isupper() and not one.help.endswith("."), one
        assert one.group and one.commands and one.kind.metavar
    assert len({one.env for one in declared}) == len(declared)


@pytest.mark.parametrize("one", settings(Config), ids=lambda one: one.name)
def test_every_setting_is_read_from_all_three_sources(one: Any, yaml: Path) -> None:
    text = "::1" if one.name == "host" else example(one.kind)
    if one.default is True:
        text = "false"
    yaml.write_text(f"{one.name.replace('_', '-')}: {text}\n")
    command = one.commands[0]
    apart = {"role": "prefill", "channel": "tcp://a:1", "keys_dir": "/k"}
    need = {name: value for name, value in apart.items() if name != one.name} if command != "serve" else {}
    from_file = load(command, need, {}, yaml).config
    from_env = load(command, need, {one.env: text}).config
    from_line = load(command, need | {one.name: [text] if one.kind.many else text}, {}).config
    assert getattr(from_file, one.name) == getattr(from_env, one.name) == getattr(from_line, one.name)
    assert getattr(from_line, one.name) != getattr(Config(), one.name)


def example(kind: Kind) -> str:
    """A text that this kind of setting accepts, and that is no default."""
    for text in (
        "7",
        "cpu",
        "float16",
        "nixl",
        "decode",
        "debug",
        "true",
        "false",
        "never",
        "advise",
        "tcp://x:1",
    ):
        try:
            kind.parse(text)
        except ValueError:
            continue
        return text
    raise AssertionError(kind)


def test_later_sources_win_and_say_where_they_are_from(yaml: Path) -> None:
    yaml.write_text("port: 1\nmax_num_seqs: 2\ndecode: 3\nrevision: null\n")
    found = loaded({"port": "4", "decode": None}, {"DIPTYCH_PORT": "5", "DIPTYCH_MAX_NUM_SEQS": "6"}, yaml)
    assert (found.config.port, found.config.max_num_seqs, found.config.decode) == (4, 6, 3)
    assert found.origin("port") == "--port"
    assert found.origin("max_num_seqs") == "DIPTYCH_MAX_NUM_SEQS"
    assert found.origin("decode") == f"decode in {yaml}"
    assert found.origin("prefill") == "the default"
    assert dump(found.config) == {"port": 4, "max_num_seqs": 6, "decode": 3}


def test_the_file_may_be_named_by_the_environment(yaml: Path) -> None:
    yaml.write_text("port: 9\n")
    assert loaded(env={"DIPTYCH_CONFIG": str(yaml)}).config.port == 9


def test_an_unknown_yaml_key_is_named_with_the_one_that_was_meant(yaml: Path) -> None:
    yaml.write_text("max_model_length: 5\n")
    told = refused(file=yaml)
    assert "unknown key 'max_model_length'" in told and "did you mean 'max_model_len'?" in told


def test_an_environment_name_that_is_nearly_ours_is_refused_and_others_are_not() -> None:
    assert "did you mean 'DIPTYCH_PORT'?" in refused(env={"DIPTYCH_PROT": "1"})
    # What Kubernetes sets for a service called "diptych" must not stop us.
    assert loaded(env={"DIPTYCH_SERVICE_HOST": "10.0.0.1", "DIPTYCH_URL": "http://x"}).config == Config()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("port", "http", "is not a whole number"),
        ("port", "70000", "must be from 0 to 65535"),
        ("max_num_seqs", "0", "must be at least 1"),
        ("max_model_len", "1.5", "is not a whole number"),
        ("kv_cache_memory_bytes", "8 elephants", "is not a size"),
        ("request_timeout_s", "soon", "is not a duration"),
        ("slo_ttft_ms", "0", "must be above 0"),
        ("dtype", "int8", "is not one of auto, float32"),
        ("transports", "shm,tcp", "is not one of shm, nixl"),
        ("transports", "shm,shm", "names the same thing twice"),
        ("enable_chunked_prefill", "perhaps", "is neither true nor false"),
        ("model", "", "is not a text"),
    ],
)
def test_a_wrong_value_names_its_source_and_the_form(name: str, value: str, said: str) -> None:
    told = refused({name: value})
    flag = "--" + name.replace("_", "-")
    assert told.startswith(f"error: {flag}: ") and said in told and f"fix: {flag} " in told


def test_a_secret_is_not_repeated_in_a_message() -> None:
    assert "hush" not in refused({"api_key": ["hush,hush"]})
    assert "hush" not in refused({"admin_key": ["hush"]})
    assert "hush" not in refused({"admin_key": "hu\nhush"})


def test_a_key_that_no_header_can_hold_is_refused_and_a_line_end_is_not_part_of_one() -> None:
    assert "control character" in refused({"admin_key": "a\nb"})
    assert "control character" in refused({"api_key": ["a\tb"]})
    found = loaded({"admin_key": "clé \n", "api_key": [" k\n"]}).config
    assert (found.admin_key, found.api_key) == ("clé", ("k",))


def test_pools_and_colocated_exclude_each_other() -> None:
    assert loaded({"colocated": "2"}).config.pools == (0, 2)
    assert loaded({"decode": "2"}).config.pools == (1, 2)
    assert "either colocated or has two pools" in refused({"colocated": "1"}, {"DIPTYCH_DECODE": "1"})
    assert "the prefill pool has no workers" in refused({"prefill": "0"})


def test_ranks_and_stages_belong_to_pools_that_are_there() -> None:
    for name in ("prefill_tp", "prefill_pp"):
        told = refused({"colocated": "1"}, {f"DIPTYCH_{name.upper()}": "2"})
        assert "no prefill workers to split" in told and f"DIPTYCH_{name.upper()}" in told
        assert "must be at least 1" in refused({name: "0"})
    config = loaded({"colocated": "2", "decode_tp": "2", "decode_pp": "3"}).config
    assert (config.pools, config.decode_tp, config.decode_pp) == ((0, 2), 2, 3)


def test_other_hosts_need_a_key() -> None:
    assert "no API key is set" in refused({"host": "0.0.0.0"})
    assert "no API key is set" in refused({"host": "example.org"})
    for more in ({"api_key": ["k"]}, {"insecure": True}):
        assert not loaded({"host": "0.0.0.0", **more}).config.local_only
    for host in ("localhost", "127.0.0.9", "::1"):
        assert loaded({"host": host}).config.local_only


def test_parts_that_run_alone_must_be_told_where_their_deployment_is() -> None:
    assert "`diptych gateway` needs --channel" in refused(command="gateway")
    assert "`diptych worker` needs --role" in refused(command="worker")


def test_keys_come_from_both_places_once(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nb\n a \n")
    assert keys(loaded({"api_key": ["a"], "api_key_file": str(file)})) == ("a", "b")
    assert keys(loaded()) == ()


@pytest.mark.parametrize("content", [None, "# nothing\n", b"\xff\xfe"])
def test_a_key_file_that_cannot_be_used_is_an_error(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "keys"
    if isinstance(content, str):
        file.write_text(content)
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        keys(loaded({"api_key_file": str(file)}))
    assert str(file) in caught.value.what and len(caught.value.lines()) <= 6


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [\n", "just words\n"])
def test_a_file_that_is_no_mapping_is_an_error(yaml: Path, content: str) -> None:
    yaml.write_text(content)
    assert str(yaml) in refused(file=yaml)
    assert "cannot be read" in refused(file=yaml.with_name("absent.yaml"))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (whole(), "2k", 2000),
        (whole(), "2K", 2048),
        (whole(), 5.0, 5),
        (size(), "8GiB", 8 << 30),
        (size(), "1.5GB", 1_500_000_000),
        (size(), "512 MiB", 512 << 20),
        (size(), "1_000", 1000),
        (seconds(), "500ms", 0.5),
        (seconds(), "2m", 120.0),
        (seconds(), "30", 30.0),
        (seconds(), 30, 30.0),
        (milliseconds(), "200", 200.0),
        (milliseconds(), "0.5s", 500.0),
    ],
)
def test_units(kind: Kind, text: Any, value: float) -> None:
    assert kind.parse(text) == value


@given(
    st.text() | st.booleans() | st.none() | st.lists(st.integers()) | st.dictionaries(st.text(), st.text())
)
def test_parsers_raise_value_error_and_nothing_else(value: Any) -> None:
    for one in settings(Config):
        try:
            one.kind.parse(value)
        except ValueError:
            continue


def test_defaults_of_the_specifications_are_those_of_the_settings() -> None:
    config = Config()
    spec = WorkerSpec(worker="w", role="decode", gateway="g", keys_dir="k", model="m")
    same = (
        "dtype",
        "device",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "threads",
        "transports",
    )
    assert [getattr(spec, name) for name in same] == [getattr(config, name) for name in same]
    gateway = GatewaySpec(
        host="h",
        port=1,
        channel="c",
        keys_dir="k",
        model="m",
        served_names=("m",),
        num_prefill=1,
        num_decode=1,
    )
    also = (
        "request_timeout_s",
        "reader_stall_s",
        "drain_s",
        "max_open_requests",
        "max_body_bytes",
        "slo_ttft_ms",
    )
    assert [getattr(gateway, name) for name in also] == [getattr(config, name) for name in also]


@pytest.mark.parametrize(
    ("spec", "rooms"),
    [
        (WorkerSpec, ("worker", "services/worker")),
        (GatewaySpec, ("services/gateway",)),
    ],
)
def test_every_field_of_a_specification_is_read_by_the_part_it_is_for(
    spec: type[Any], rooms: tuple[str, ...]
) -> None:
    text = "".join(path.read_text(encoding="utf-8") for room in rooms for path in (ROOT / room).glob("*.py"))
    assert [name for name in spec.__struct_fields__ if not re.search(rf"\bspec\.{name}\b", text)] == []


def test_the_documentation_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == document(), "run `make docs`"
