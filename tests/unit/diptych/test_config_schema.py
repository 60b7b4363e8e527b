"""The JSON Schema for editors takes and refuses what the program takes and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from diptych.config.fields import SettingSpec, list_settings
from diptych.config.options import Config
from diptych.config.schema import DIALECT, render_schema, yaml_schema

ROOT = Path(__file__).parents[3]
SCHEMA = yaml_schema()
SETTINGS = list_settings(Config)
# What a YAML file may hold: with the bounds of each kind, each unit, lists and switches among them.
VALUES: tuple[Any, ...] = (
    *(0, 1, 7, -3, 0.5, 5.0, 65535, 10**9, True, False, "", "  ", "7", "+7", "1_000", "2k", "2K", "1.5G"),
    *("512MiB", "512 MiB", "8 elephants", "30s", "500ms", "2 min", "1h", "soon", "cpu", "auto", "Auto"),
    *("float16", "bfloat16", "int8", "shm", "nixl", "shm, nixl", "shm,,nixl", "shm,tcp", "tcp://h:1"),
    *("never", "advise", "decode", "debug", "yes", "OFF", "perhaps", "/a/b", "~/c", "owner/name", "short"),
    *("a key of 16 chars", " a key of 16 chars ", "a key, of 16 chars", "a\tkey of 16 chars"),
    *([], ["a", "b"], ["a", "a"], ["a,b", "c"], ["shm", "nixl"], ["nixl", "tcp"], ["a key of 16 chars"]),
    *([["a"]], [1], [True], {"a": 1}),
)
# A schema cannot compute: the size of a number in a text, whether it is whole, and texts that are there twice.
NOT_IN_A_SCHEMA = ("out of range", "is not a whole number", "is not a size", "the same thing twice")


def taken_by_schema(key: str, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid({key: value}))


def refusal(one: SettingSpec, value: Any) -> str | None:
    try:
        one.kind.parse(value)
    except ValueError as error:
        return str(error)
    return None


def test_the_schema_is_valid_and_up_to_date() -> None:
    assert SCHEMA["$schema"] == DIALECT
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    file = ROOT / "docs" / "configuration.schema.json"
    assert file.read_text(encoding="utf-8") == render_schema() + "\n", "run `make docs`"


@pytest.mark.parametrize("one", SETTINGS, ids=lambda one: one.name)
def test_the_schema_agrees_with_the_program(one: SettingSpec) -> None:
    for value in VALUES:
        reason, taken = refusal(one, value), taken_by_schema(one.name, value)
        if reason is None:
            assert taken, f"the schema refuses {value!r}"
        elif not (isinstance(value, str) and any(known in reason for known in NOT_IN_A_SCHEMA)):
            assert not taken, f"the schema takes {value!r}, which {reason}"


@pytest.mark.parametrize("one", SETTINGS, ids=lambda one: one.name)
def test_every_key_has_description_default_and_both_spellings(one: SettingSpec) -> None:
    described = SCHEMA["properties"][one.name]
    default = list(one.default) if isinstance(one.default, tuple) else one.default
    assert described["description"] == one.help and described.get("default") == default
    for key in (one.name, one.name.replace("_", "-")):
        assert taken_by_schema(key, None) and taken_by_schema(key, default)
        assert not taken_by_schema(key, {"a": 1})


def test_units_and_choices_are_distinguished() -> None:
    for key, good, wrong in (
        ("kv-lease-s", "500ms", "500 MiB"),
        ("kv_cache_memory_bytes", "2GiB", "2 min"),
        ("port", 8000, 65536),
        ("max_num_seqs", 1, 0),
        ("slo_ttft_ms", 0.5, 0),
        ("dtype", "bfloat16", "int8"),
        ("transports", ["nixl", "shm"], ["tcp"]),
        ("admin_key", "a key of 16 chars", "a short key"),
    ):
        assert taken_by_schema(key, good) and not taken_by_schema(key, wrong), key


def test_unknown_keys_and_other_documents_are_refused() -> None:
    valid = jsonschema.Draft202012Validator(SCHEMA).is_valid
    assert valid(None) and valid({}) and not valid([]) and not valid("port") and not valid({"prot": 1})
