"""The file of named keys: what it may say, and how mistakes are refused, without a word that may be a key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from diptych.errors import ConfigError
from diptych.keys.key_file import FIELDS, MAX_KEYS, read_key_file
from diptych.keys.named_key import NamedKey, digest_key

KEY, OTHER = "k" * 24, "o" * 24


def written(folder: Path, content: Any, mode: int = 0o600) -> Path:
    file = folder / "keys.yaml"
    file.write_text(
        content if isinstance(content, str) else yaml.safe_dump({"keys": content}), encoding="utf-8"
    )
    file.chmod(mode)
    return file


def refused(folder: Path, content: Any, mode: int = 0o600, **options: Any) -> str:
    """The lines of the refusal: at most six, which name the file, and quote no key."""
    file = written(folder, content, mode)
    with pytest.raises(ConfigError) as caught:
        read_key_file(file, **options)
    lines = caught.value.lines()
    assert len(lines) <= 6 and str(file) in lines[0] and any(line.startswith("  fix:") for line in lines), (
        lines
    )
    assert KEY not in "\n".join(lines) and OTHER not in "\n".join(lines)
    return "\n".join(lines)


def test_what_it_may_say(tmp_path: Path) -> None:
    entries = [
        {"name": "team-a", "key": KEY, "requests_per_minute": 60, "tokens_per_minute": 1000, "priority": -3},
        {"name": "b_2.x", "sha256": digest_key(OTHER).hex().upper()},
    ]
    expected = (
        NamedKey("team-a", digest_key(KEY), 60, 1000, -3),
        NamedKey("b_2.x", digest_key(OTHER)),
    )
    assert read_key_file(written(tmp_path, entries)) == expected
    assert read_key_file(written(tmp_path, json.dumps({"keys": entries}), 0o640)) == expected


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        ({"request_per_minute": 1}, "did you mean 'requests_per_minute'?"),
        ({KEY: 1}, "has an unknown field"),
        ({"name": "a b"}, "no valid name"),
        ({"name": 5}, "no valid name"),
        ({"key": "short"}, "at least 16 characters"),
        ({"key": f"{KEY},{OTHER}"}, "comma"),
        ({"key": 1234567890123456}, "in quotes"),
        ({"key": None}, "it has neither"),
        ({"sha256": digest_key(OTHER).hex()}, "it has both"),
        ({"key": None, "sha256": OTHER}, "64 hex digits"),
        ({"requests_per_minute": 0}, "'requests_per_minute' is wrong"),
        ({"requests_per_minute": True}, "'requests_per_minute' is wrong"),
        ({"tokens_per_minute": "many"}, "'tokens_per_minute' is wrong"),
        ({"tokens_per_minute": 1.5}, "'tokens_per_minute' is wrong"),
        ({"priority": -11}, "from -10 to 10"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], expected_text: str) -> None:
    entry = {name: value for name, value in ({"name": "a", "key": KEY} | change).items() if value is not None}
    shown = refused(tmp_path, [{"name": "first", "key": "f" * 20}, entry])
    assert expected_text in shown and "key 2 of" in shown


@pytest.mark.parametrize(
    ("content", "expected_text"),
    [
        ("", "no list of keys"),
        ("- name: a", "no list of keys"),
        ("keys: {}", "no list of keys"),
        ("keys: []", "too few keys"),
        ("keys: [3]", "is no mapping"),
        ("keys: [", "line 1: it is no YAML"),
        (f"keys: [{{name: a, key: {KEY}, name: b}}]", "a field is given twice"),
        (f"keys: [{{name: a, key: {KEY}}}]\nother: 1", "no list of keys"),
        ("keys: " + "[" * 2000, "cannot be read"),
        (f"keys: !!python/object:os.system {KEY}", "it is no YAML"),
        ("\x00", "it is no YAML"),
    ],
)
def test_what_is_no_list_of_keys(tmp_path: Path, content: str, expected_text: str) -> None:
    assert expected_text in refused(tmp_path, content)


def test_names_and_keys_are_given_once(tmp_path: Path) -> None:
    a = {"name": "a", "key": KEY}
    assert "the name 'a' is given twice" in refused(tmp_path, [a, {"name": "a", "key": OTHER}])
    assert "that of key 1" in refused(tmp_path, [a, {"name": "b", "sha256": digest_key(KEY).hex()}])
    assert "set as an API key, too" in refused(tmp_path, [a], taken={digest_key(KEY)})
    many = [{"name": f"n{i}", "key": f"{i:020}x"} for i in range(MAX_KEYS + 1)]
    assert "too many keys" in refused(tmp_path, many)
    assert len(read_key_file(written(tmp_path, many[:-1]))) == MAX_KEYS


def test_who_may_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"name": "a", "key": KEY}]
    for mode in (0o644, 0o604, 0o620):
        assert f"chmod 600 {tmp_path}" in refused(tmp_path, entries, mode)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    if os.stat(tmp_path).st_uid:
        assert "belongs to another user" in refused(tmp_path, entries)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError) as caught:
            read_key_file(missing)
        assert str(missing) in caught.value.what and caught.value.fix


def test_it_is_not_read_without_end(tmp_path: Path) -> None:
    assert "too long" in refused(tmp_path, "#" * (1 << 20) + f"\nkeys: [{{name: a, key: {KEY}}}]")


def test_the_fields_are_those_of_the_documents() -> None:
    text = (Path(__file__).parents[3] / "docs/limits.md").read_text(encoding="utf-8")
    assert [name for name in FIELDS if f"{name}: " not in text] == []
