"""Settings: every one has all its names; later sources win; every mistake is explained with its source and a remedy."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from diptych.config.fields import list_settings
from diptych.config.load import (
    ApiKeys,
    LoadedConfig,
    collect_api_keys,
    load_config,
    with_operator_keys,
)
from diptych.config.options import Config
from diptych.config.sources import SERVICE_NAME
from diptych.config.values import (
    ValueKind,
    byte_size,
    duration_ms,
    duration_s,
    percentage,
    whole_number,
)
from diptych.errors import ConfigError
from diptych.keys.key_text import MIN_KEY_CHARS
from diptych.specs import GatewaySpec, WorkerSpec
from services.cli.serve.settings_reference import render_document

KEY = "a key of 16 chars"

ROOT = Path(__file__).parents[3]


def loaded(
    command_line: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> LoadedConfig:
    return load_config("serve", command_line or {}, env or {}, file)


def refused(
    command_line: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
    command: str = "serve",
) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(command, command_line or {}, env or {}, file)
    lines = caught.value.lines()
    assert len(lines) <= 6
    return "\n".join(lines)


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    return tmp_path / "deployment.yaml"


def test_every_setting_has_flag_yaml_environment_and_help() -> None:
    declared = list_settings(Config)
    assert [one.name for one in declared] == list(Config.model_fields)
    for one in declared:
        assert one.flag == "--" + one.name.replace("_", "-")
        assert one.env == "DIPTYCH_" + one.name.upper()
        assert 8 <= len(one.help) <= 60 and one.help[0].isupper() and not one.help.endswith("."), one
        assert one.group and one.commands and one.kind.metavar
    assert len({one.env for one in declared}) == len(declared)


@pytest.mark.parametrize("one", list_settings(Config), ids=lambda one: one.name)
def test_every_setting_is_read_from_all_three_sources(one: Any, yaml: Path) -> None:
    text = "::1" if one.name == "host" else example(one.kind)
    if one.default is True:
        text = "false"
    if one.default == text:
        text = "always"
    yaml.write_text(f"{one.name.replace('_', '-')}: {text}\n")
    command = one.commands[0]
    apart = {"role": "prefill", "channel": "tcp://a:1", "keys_dir": "/k"}
    need = {name: value for name, value in apart.items() if name != one.name} if command != "serve" else {}
    if one.name in ("kv_disk_bytes", "kv_disk_folder"):
        below = {"kv_host_bytes": "1GiB", "kv_disk_bytes": "1GiB", "kv_disk_folder": "/kv"}
        need = {name: value for name, value in below.items() if name != one.name}
    if one.name == "trace_sample":
        need = {"otlp_traces_endpoint": "http://collector:4318/v1/traces"}
    if one.name.startswith("bulk") and one.name != "bulk_slice_ms":
        need = {"prefill": "0", "decode": "0", "data_dir": "/d"} | (
            {} if one.name == "bulk" else {"bulk": "1"}
        )
    from_file = load_config(command, need, {}, yaml).config
    from_env = load_config(command, need, {one.env: text}).config
    from_line = load_config(command, need | {one.name: [text] if one.kind.many else text}, {}).config
    assert getattr(from_file, one.name) == getattr(from_env, one.name) == getattr(from_line, one.name)
    assert getattr(from_line, one.name) != getattr(Config(), one.name)


PARTS = {"channel": "tcp://127.0.0.1:1", "keys_dir": "/keys"}


def example(kind: ValueKind) -> str:
    """A text that this kind of setting accepts, and that is no default."""
    for text in (
        "7",
        "vllm",
        "qwen3",
        "hermes",
        "cpu",
        "float16",
        "nixl",
        "decode",
        "debug",
        "true",
        "false",
        "never",
        "ignore",
        "advise",
        "json",
        "tcp://x:1",
        "http://x:1/y",
        "0.5",
        "/llm",
        "a key of 16 chars",
        "auto",
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
    assert found.origin_of("port") == "--port"
    assert found.origin_of("max_num_seqs") == "DIPTYCH_MAX_NUM_SEQS"
    assert found.origin_of("decode") == f"decode in {yaml}"
    assert found.origin_of("prefill") == "the default"
    assert (found.config.port, found.config.max_num_seqs, found.config.decode) == (4, 6, 3)


def test_the_file_may_be_named_by_the_environment(yaml: Path) -> None:
    yaml.write_text("port: 9\n")
    assert loaded(env={"DIPTYCH_CONFIG": str(yaml)}).config.port == 9


def test_an_unknown_yaml_key_is_named_with_the_one_that_was_meant(yaml: Path) -> None:
    yaml.write_text("max_model_length: 5\n")
    message = refused(file=yaml)
    assert "unknown key 'max_model_length'" in message and "did you mean 'max_model_len'?" in message


def test_an_environment_name_that_is_nearly_ours_is_refused_and_others_are_not() -> None:
    assert "did you mean 'DIPTYCH_PORT'?" in refused(env={"DIPTYCH_PROT": "1"})
    # What Kubernetes sets for a service called "diptych" must not stop us.
    assert loaded(env={"DIPTYCH_SERVICE_HOST": "10.0.0.1", "DIPTYCH_URL": "http://x"}).config == Config()


@pytest.mark.parametrize("service", ["DIPTYCH", "DIPTYCH_DECODE", "DIPTYCH_PREFILL", "DIPTYCH_METRICS"])
def test_names_that_kubernetes_sets_for_a_service_are_passed_over(service: str) -> None:
    url = "tcp://10.0.0.1:8000"
    injected = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP": "8000",
        f"{service}_PORT": url,
        f"{service}_PORT_8000_TCP": url,
        f"{service}_PORT_8000_TCP_PROTO": "tcp",
        f"{service}_PORT_8000_TCP_PORT": "8000",
        f"{service}_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    found = loaded({"decode": "3"}, injected)
    assert (found.config.port, found.config.decode, set(found.origins)) == (Config().port, 3, {"decode"})


def test_a_mistake_in_our_own_names_is_still_refused_beside_those_of_kubernetes() -> None:
    assert "is not a whole number" in refused(env={"DIPTYCH_PORT": "10.0.0.1:8000"})
    assert "did you mean 'DIPTYCH_DECODE_TP'?" in refused(env={"DIPTYCH_DECODE_PORT": "2"})
    assert "did you mean 'DIPTYCH_PORT'?" in refused(env={"DIPTYCH_PORTS": "tcp://10.0.0.1:8000"})
    assert loaded(env={"DIPTYCH_CHANNEL": "tcp://h:1"}).config.channel == "tcp://h:1"
    assert [one.env for one in list_settings(Config) if SERVICE_NAME.fullmatch(one.env)] == []


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
        ("kv_lease_s", "0.1", "must be at least 1 s"),  # renewals go out with ticks of 0.1 s
        ("transports", "shm,tcp", "is not one of shm, nixl"),
        ("transports", "shm,shm", "names the same thing twice"),
        ("enable_chunked_prefill", "perhaps", "is neither true nor false"),
        ("model", "", "is not a text"),
        ("otlp_traces_endpoint", "collector:4317", "is not a URL such as http://"),
        ("otlp_traces_endpoint", "http://", "is not a URL"),
        ("otlp_traces_endpoint", "http://user:secret@h/", "is not a URL"),
        ("trace_sample", "1.5", "must be between 0 and 1, both included"),
        ("trace_sample", "-0.1", "must be between 0 and 1"),
        ("kv_keep", "0", "must be between 0 and 1, 1 included"),
        ("kv_keep", "101%", "must be between 0 and 1, 1 included"),
        ("trace_sample", "some", "is not a share"),
        ("log_format", "xml", "is not one of text, json"),
    ],
)
def test_a_wrong_value_names_its_source_and_the_form(name: str, value: str, said: str) -> None:
    message = refused({name: value})
    flag = "--" + name.replace("_", "-")
    assert message.startswith(f"error: {flag}: ") and said in message and f"fix: {flag} " in message


def test_a_secret_is_not_repeated_in_a_message() -> None:
    for name in ("api_key", "admin_key", "metrics_key"):
        for value in ("hush", "hush,hush", "hu\nhush", ["hush hush hush hush"] * 2):
            assert "hush" not in refused({name: value})


def test_a_comma_does_not_make_several_keys_of_one() -> None:
    for line, environ in (
        ({"api_key": ["a" * 16 + ",b"]}, {}),
        ({}, {"DIPTYCH_API_KEY": "abc," + "b" * 40}),
    ):
        message = refused(line, environ)
        assert "one value is one key" in message and "file" in message
    assert loaded({"api_key": ["a" * 16, "b" * 16]}).config.api_key == ("a" * 16, "b" * 16)


def test_a_key_that_can_be_guessed_is_refused() -> None:
    for name in ("api_key", "admin_key", "metrics_key"):
        assert f"at least {MIN_KEY_CHARS} characters" in refused({name: "k" * (MIN_KEY_CHARS - 1)})
        loaded({name: "k" * MIN_KEY_CHARS})


def test_a_key_that_no_header_can_hold_is_refused_and_a_line_end_is_not_part_of_one() -> None:
    assert "control character" in refused({"admin_key": "a\nb"})
    assert "control character" in refused({"api_key": ["a\tb"]})
    found = loaded({"admin_key": "clé non: clef d'or \n", "api_key": [f" {KEY}\n"]}).config
    assert (found.admin_key, found.api_key) == ("clé non: clef d'or", (KEY,))


def test_a_wrong_value_is_refused_even_where_another_source_overrides_it(yaml: Path) -> None:
    yaml.write_text("port: http\nprefill: none\n")
    assert f"port in {yaml}: 'http' is not a whole number" in refused({"port": "1"}, {}, yaml)
    yaml.write_text("prefill: none\nport: .inf\n")
    assert "prefill in" in refused(file=yaml), "the first of them in the file"
    yaml.write_text("port: .inf\n")
    assert "inf is not a whole number" in refused(file=yaml)


@pytest.mark.parametrize("name", ["slo_ttft_ms", "request_timeout_s"])
def test_a_duration_has_an_end_since_json_has_no_infinity(name: str, yaml: Path) -> None:
    yaml.write_text(f"{name}: .inf\n")
    assert f"{name} in {yaml}: inf is out of range: it is too large" in refused(file=yaml)


def test_defaults_do_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_PORT", "9")
    assert Config().port == 8000 and loaded().config == Config()
    assert loaded(env={"diptych_port": "9"}).config.port == 8000, "names are written in capitals"


def test_a_configuration_is_frozen_and_has_no_other_fields() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().port = 1
    with pytest.raises(ValidationError) as caught:
        Config(admin_key="hush")
    assert "hush" not in str(caught.value)
    with pytest.raises(ValidationError, match="not permitted"):
        Config.model_validate({"prot": 1})


def test_pools_and_colocated_exclude_each_other() -> None:
    assert loaded({"colocated": "2"}).config.pools == (0, 2)
    assert loaded({"decode": "2"}).config.pools == (1, 2)
    assert "either colocated or has two pools" in refused({"colocated": "1"}, {"DIPTYCH_DECODE": "1"})
    assert "the prefill pool has no workers" in refused({"prefill": "0"})


def test_ranks_and_stages_belong_to_pools_that_are_there() -> None:
    for name in ("prefill_tp", "prefill_pp"):
        message = refused({"colocated": "1"}, {f"DIPTYCH_{name.upper()}": "2"})
        assert "no prefill workers to split" in message and f"DIPTYCH_{name.upper()}" in message
        assert "must be at least 1" in refused({name: "0"})
    config = loaded({"colocated": "2", "decode_tp": "2", "decode_pp": "3"}).config
    assert (config.pools, config.decode_tp, config.decode_pp) == ((0, 2), 2, 3)


def test_an_overdraft_needs_two_pools() -> None:
    assert loaded({"decode_overdraft": "auto"}).config.decode_overdraft == "auto"
    for mode in ("auto", "off"):
        message = refused({"colocated": "1", "decode_overdraft": mode})
        assert "has no effect" in message and "decode-overdraft" in message
    assert "does not go with --decode 0" in refused({"decode": "0", "decode_overdraft": "auto"})


def test_other_hosts_need_a_key() -> None:
    assert "no API key is set" in refused({"host": "0.0.0.0"})
    assert "no API key is set" in refused({"host": "example.org"})
    for more in ({"api_key": [KEY]}, {"insecure": True}):
        assert not loaded({"host": "0.0.0.0", **more}).config.local_only
    for host in ("localhost", "127.0.0.9", "::1"):
        assert loaded({"host": host}).config.local_only


def test_parts_that_run_alone_must_know_where_their_deployment_is() -> None:
    assert "`diptych gateway` needs --channel" in refused(command="gateway")
    assert "`diptych worker` needs --role" in refused(command="worker")


def test_keys_come_from_both_places_once(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    a, b = "a" * 16, "b" * 16
    file.write_text(f"# ours\n\n{b}\n {a} \n")
    file.chmod(0o600)
    assert collect_api_keys(loaded({"api_key": [a], "api_key_file": str(file)})).every == (a, b)
    assert collect_api_keys(loaded()) == ApiKeys((), ())


def test_keys_that_may_ask_for_a_better_priority_are_api_keys_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    file.chmod(0o400)
    given = loaded({"api_key": ["a" * 16], "priority_keys": str(file), "host": "0.0.0.0"})
    assert collect_api_keys(given) == ApiKeys(("a" * 16, KEY), (KEY,))


@pytest.mark.parametrize("name", ["api_key_file", "priority_keys"])
def test_a_key_file_may_be_a_pipe(name: str) -> None:
    """As a shell's `<(command)` is."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        pipe.write(f"{KEY}\n")
    try:
        assert collect_api_keys(loaded({name: f"/dev/fd/{reading}"})).every == (KEY,)
    finally:
        os.close(reading)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["api_key_file", "priority_keys"])
def test_a_key_file_of_another_user_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to another user") as caught:
        collect_api_keys(loaded({name: str(file)}))
    assert len(caught.value.lines()) <= 6


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660])
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    file.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        collect_api_keys(loaded({"api_key_file": str(file)}))
    message = "\n".join(caught.value.lines())
    assert "open to other users" in message and f"chmod 600 {file}" in message and KEY not in message
    file.chmod(0o640)
    assert collect_api_keys(loaded({"api_key_file": str(file)})).every == (KEY,)


@pytest.mark.parametrize("content", [None, "# nothing\n", b"\xff\xfe", "short\n", f"{'k' * 20},{'l' * 20}"])
def test_a_key_file_that_cannot_be_used_is_an_error(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "keys"
    if isinstance(content, str):
        file.write_text(content)
    elif content is not None:
        file.write_bytes(content)
    if content is not None:
        file.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        collect_api_keys(loaded({"api_key_file": str(file)}))
    assert str(file) in caught.value.what and len(caught.value.lines()) <= 6


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [\n", "just words\n"])
def test_a_file_that_is_no_mapping_is_an_error(yaml: Path, content: str) -> None:
    yaml.write_text(content)
    assert str(yaml) in refused(file=yaml)
    assert "cannot be read" in refused(file=yaml.with_name("absent.yaml"))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (whole_number(), "2k", 2000),
        (whole_number(), "2K", 2048),
        (whole_number(), 5.0, 5),
        (byte_size(), "8GiB", 8 << 30),
        (byte_size(), "1.5GB", 1_500_000_000),
        (byte_size(), "512 MiB", 512 << 20),
        (byte_size(), "1_000", 1000),
        (duration_s(), "500ms", 0.5),
        (duration_s(), "2m", 120.0),
        (duration_s(), "30", 30.0),
        (duration_s(), 30, 30.0),
        (duration_ms(), "200", 200.0),
        (duration_ms(), "0.5s", 500.0),
        (percentage(), "1%", 1.0),
        (percentage(), "0.5 %", 0.5),
        (percentage(), 2, 2.0),
    ],
)
def test_units(kind: ValueKind, text: Any, value: float) -> None:
    assert kind.parse(text) == value


@given(
    st.text() | st.booleans() | st.none() | st.lists(st.integers()) | st.dictionaries(st.text(), st.text())
)
def test_parsers_raise_value_error_and_nothing_else(value: Any) -> None:
    for one in list_settings(Config):
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
        "max_connections",
        "slo_ttft_ms",
    )
    assert [getattr(gateway, name) for name in also] == [getattr(config, name) for name in also]


@pytest.mark.parametrize(
    ("spec", "rooms"),
    [
        (WorkerSpec, ("worker", "services/worker", "services/host/vllm")),
        (GatewaySpec, ("services/gateway",)),
    ],
)
def test_every_field_of_a_specification_is_read_by_the_part_it_is_for(
    spec: type[Any], rooms: tuple[str, ...]
) -> None:
    text = "".join(path.read_text(encoding="utf-8") for room in rooms for path in (ROOT / room).rglob("*.py"))
    for name, one in vars(spec).items():
        if isinstance(one, property) and one.fget and re.search(rf"\bspec\.{name}\b", text):
            # Who reads a property reads its fields.
            text += inspect.getsource(one.fget).replace("self.", "spec.")
    assert [name for name in spec.__struct_fields__ if not re.search(rf"\bspec\.{name}\b", text)] == []


def test_the_documentation_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == render_document(), (
        "run `make docs`"
    )


@pytest.mark.parametrize("named", [".", ""])
def test_a_folder_is_no_configuration_file(named: str) -> None:
    """The library takes this path for "no file was given"."""
    assert "the configuration file . cannot be read" in refused(file=Path(named))


SECRET_LINES = [
    'api_key: "my-very-secret-key-0123456789',
    "admin_key: my-very-secret-key-0123456789: x",
    "api_key: @my-very-secret-key-0123456789",
    "api_key: *my-very-secret-key-0123456789",
    "api_key: !my-very-secret-key-0123456789 x",
    'api_key: "my-very-secret-key-0123456789\\q"',
    "api_key: [my-very-secret-key-0123456789",
    "api_key: %my-very-secret-key-0123456789",
]


@pytest.mark.parametrize("line", SECRET_LINES)
def test_no_error_about_a_file_quotes_it(line: str, tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(line + "\n", encoding="utf-8")
    shown = refused(file=file)
    assert "secret" not in shown
    assert "line 1," in shown or "line 2," in shown


BAD_FILES = {
    "slo_ttft_ms: 1" + "0" * 400: "slo_ttft_ms in",
    "max_num_seqs: 1" + "0" * 5000: "a number that YAML cannot hold",
    "plan: ~nosuchuser-here/p": "names the home folder of a user who is not there",
    'plan: "a\\0b"': "is not a path",
    "model: " + "[" * 2000: "nested too deeply",
    "max_num_seqs: banana\nmax-num-seqs: 4": "max_num_seqs is set twice",
    "#" * ((1 << 20) + 1): "has more than 1 MiB",
}


@pytest.mark.parametrize("content", BAD_FILES, ids=list(BAD_FILES.values()))
def test_a_bad_file_is_an_error_of_a_few_short_lines(content: str, tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(content + "\n", encoding="utf-8")
    shown = refused(file=file)
    assert BAD_FILES[content] in shown
    assert all(len(line) < 400 for line in shown.splitlines())


def test_a_value_of_many_aliases_is_shown_in_short(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    levels = [f"- &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]" for level in range(1, 9)]
    file.write_text(
        "model:\n- &l0 [x, x, x, x, x, x, x, x, x]\n" + "\n".join(levels) + "\n", encoding="utf-8"
    )
    assert len(refused(file=file)) < 1000


@pytest.mark.parametrize(("text", "target"), [("0.99", 0.99), ("99.9%", pytest.approx(0.999)), (0.5, 0.5)])
def test_a_target_is_a_share(text: str | float, target: float) -> None:
    loaded = load_config("gateway", PARTS | {"slo_target": text, "slo_ttft_ms": "500"}, {})
    assert loaded.config.slo_target == target


@pytest.mark.parametrize("text", ["0", "1", "100%", "-0.5", "1.5", "90", "nan", "most"])
def test_a_target_outside_0_and_1_is_an_error_of_a_few_lines(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("gateway", PARTS | {"slo_target": text, "slo_ttft_ms": "500"}, {})
    lines = caught.value.lines()
    assert len(lines) <= 6 and "--slo-target" in lines[0]


@pytest.mark.parametrize("name", ["kv_keep", "trace_sample", "slo_target"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_share_that_is_no_number_is_refused(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ValidationError, match="is out of range: it must be between 0 and 1"):
        Config(**settings)


def test_a_target_without_objectives_has_no_effect_and_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("gateway", PARTS | {"slo_target": "0.99"}, {})
    assert "--slo-target has no effect" in "\n".join(caught.value.lines())
    assert load_config("serve", {"slo_target": "0.99"}, {}).config.slo_target == 0.99, "a plan may bring SLOs"


def test_a_share_of_traces_that_nobody_gets_is_refused() -> None:
    message = refused({"trace_sample": "0.1"})
    assert "--trace-sample has no effect" in message and "--otlp-traces-endpoint URL" in message
    assert len(message.splitlines()) <= 6
    both = {"trace_sample": "10%", "otlp_traces_endpoint": "https://collector.example/v1/traces"}
    assert loaded(both).config.trace_sample == 0.1


@pytest.mark.parametrize("name", ["metrics_key", "admin_key"])
def test_an_operator_s_key_may_be_in_a_file_and_is_one(name: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o640)
    named = loaded({f"{name}_file": str(file)})
    assert getattr(with_operator_keys(named).config, name) == KEY
    assert getattr(with_operator_keys(loaded()).config, name) is None
    with pytest.raises(ConfigError, match="two keys"):
        with_operator_keys(loaded({f"{name}_file": str(file), name: "m" * 16}))
    file.write_text(f"{KEY}\n{'n' * 16}\n")
    with pytest.raises(ConfigError, match="two keys") as caught:
        with_operator_keys(named)
    assert KEY not in "\n".join(caught.value.lines())
