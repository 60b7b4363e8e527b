"""Reads the file of `--keys`: API keys with names, rates and priorities, as YAML (and so as JSON).

    keys:
      - name: team-a
        key: 3f9c...                    # or sha256: the hex digits of its SHA-256 digest
        requests_per_minute: 600        # without one there is no limit
        tokens_per_minute: 200000
        priority: -5                    # the best that its requests may have (default 0)

What is read holds digests alone. No message quotes the file, whose mistakes may be keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from diptych.errors import ConfigError
from diptych.keys.key_text import check_key_text
from diptych.keys.named_key import NamedKey, digest_key
from diptych.keys.private_file import read_private_file
from diptych.request import MAX_PRIORITY, MIN_PRIORITY

FIELDS = ("name", "key", "sha256", "requests_per_minute", "tokens_per_minute", "priority")
# Names are labels of metrics, so there are not many of them.
MAX_KEYS = 1000
MAX_KEY_FILE_BYTES = 1 << 20
MAX_RATE = 10**12
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DIGEST_PATTERN = re.compile(r"[0-9A-Fa-f]{64}")
EXAMPLE = "keys:  - {name: team-a, key: KEY, requests_per_minute: 600}"


class _Loader(yaml.SafeLoader):
    """YAML without fields that are given twice, of which the library would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node. Raises yaml.MarkedYAMLError if a field is given twice."""
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(problem="twice", problem_mark=key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_key_file(
    file: Path, origin: str = "--keys", taken: Collection[bytes] = frozenset()
) -> tuple[NamedKey, ...]:
    """The keys of a file. `origin` says where its path came from; `taken` are digests of keys that are set elsewhere.

    Raises:
        ConfigError: it cannot be read, others can read it, or what it says is wrong.
    """
    make = f"write it with  umask 077  :  {EXAMPLE}"
    if file.exists() and not file.is_file():
        raise ConfigError(f"the key file {file} is no file", "it is read again when it changes", make)
    tree = _parse_yaml(read_private_file(file, origin, make, MAX_KEY_FILE_BYTES), file)
    if not isinstance(tree, dict) or list(tree) != ["keys"] or not isinstance(tree["keys"], list):
        raise ConfigError(f"the key file {file} is no list of keys", "it has to hold 'keys:' alone", EXAMPLE)
    entries = tree["keys"]
    if not 0 < len(entries) <= MAX_KEYS:
        why = f"it has {len(entries)}, and 1 to {MAX_KEYS} are right"
        raise ConfigError(f"the key file {file} has too {'many' if entries else 'few'} keys", why, EXAMPLE)
    keys: list[NamedKey] = []
    names, digests = dict[str, int](), dict[bytes, int]()
    for number, entry in enumerate(entries, 1):
        where = f"key {number} of {file}"
        key = _read_entry(entry, where)
        if key.name in names:
            why = f"key {names[key.name]} has it, too"
            raise ConfigError(f"{where}: the name {key.name!r} is given twice", why, "give each its own name")
        if key.digest in digests or key.digest in taken:
            whose = (
                f"that of key {digests[key.digest]}" if key.digest in digests else "set as an API key, too"
            )
            why = f"it is {whose}, and a key has one name"
            raise ConfigError(f"{where}: the key is given twice", why, "leave out one of them")
        names[key.name] = digests[key.digest] = number
        keys.append(key)
    return tuple(keys)


def _parse_yaml(text: str, file: Path) -> Any:
    """The tree of a file. Raises ConfigError, without a word of the file, if it is not YAML."""
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}" if mark else "somewhere"
        what = "a field is given twice" if error.problem == "twice" else "it is no YAML"
        raise ConfigError(f"the key file {file} cannot be read", f"{where}: {what}", EXAMPLE) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        raise ConfigError(f"the key file {file} cannot be read", "it is no YAML", EXAMPLE) from None


def _read_entry(entry: Any, where: str) -> NamedKey:
    """One key. Raises ConfigError if it is wrong."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is no mapping", "each key has fields", EXAMPLE)
    for name in entry:
        if name not in FIELDS:
            close = difflib.get_close_matches(str(name), FIELDS, n=1)
            # What is no name of a field may be a key.
            shown = f": {name!r}" if close else ""
            why = f"did you mean {close[0]!r}?" if close else "what it means is not known"
            raise ConfigError(f"{where} has an unknown field{shown}", why, f"fields: {', '.join(FIELDS)}")
    name = entry.get("name")
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        why = "a name has 1 to 64 letters, digits, dots, dashes and underscores"
        raise ConfigError(f"{where} has no valid name", why, "for example name: team-a")
    return NamedKey(
        name,
        _read_digest(entry, f"{where} ({name})"),
        _read_number(entry, "requests_per_minute", (1, MAX_RATE), where),
        _read_number(entry, "tokens_per_minute", (1, MAX_RATE), where),
        _read_number(entry, "priority", (MIN_PRIORITY, MAX_PRIORITY), where) or 0,
    )


def _read_digest(entry: Mapping[Any, Any], where: str) -> bytes:
    """The digest of an entry's key. Raises ConfigError unless the entry has exactly one key or digest."""
    key, digest = entry.get("key"), entry.get("sha256")
    if (key is None) == (digest is None):
        raise ConfigError(
            f"{where} needs either 'key' or 'sha256'",
            f"it has {'neither' if key is None else 'both'}",
            "sha256:  printf %s KEY | sha256sum",
        )
    if digest is not None:
        if not isinstance(digest, str) or not DIGEST_PATTERN.fullmatch(digest):
            why = "it is the SHA-256 of the key as 64 hex digits, in quotes if all are digits"
            raise ConfigError(f"{where}: 'sha256' is no digest", why, "printf %s KEY | sha256sum")
        return bytes.fromhex(digest)
    try:
        if not isinstance(key, str):
            raise ValueError("is no text: write it in quotes")
        return digest_key(check_key_text(key))
    except ValueError as error:
        raise ConfigError(f"{where}: the key {error}", fix="openssl rand -hex 24") from None


def _read_number(entry: Mapping[Any, Any], name: str, bounds: tuple[int, int], where: str) -> int | None:
    """A whole number of an entry; None if it is not there. Raises ConfigError if it is none, or out of bounds."""
    value, (least, most) = entry.get(name), bounds
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        why = f"it is a whole number from {least} to {most}"
        raise ConfigError(f"{where}: {name!r} is wrong", why, f"for example {name}: {max(least, 0) or 1}")
    return value
