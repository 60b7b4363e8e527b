"""One module parses `config.json`; the others take what it read."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from diptych.model_config import FAMILIES, load_model_config
from planner.costs.model import find_model
from tests.support.product_trees import PACKAGES

ROOT = Path(__file__).parents[3]
READER = ROOT / "diptych" / "model_config.py"
PARSERS = {"loads", "load", "decode", "read_json_object", "convert"}


def parses_config(source: str) -> bool:
    """Whether a file names `config.json` itself, or hands its path to a parser of JSON."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value == "config.json":
            return True
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        named = {getattr(part, "id", "") for part in ast.walk(node)}
        if called in PARSERS and "CONFIG_FILE" in named:
            return True
    return False


def test_one_module_parses_config_json() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert [file for file in files if parses_config(file.read_text(encoding="utf-8"))] == [READER]


def test_the_check_can_fail() -> None:
    assert parses_config("json.loads((folder / CONFIG_FILE).read_text())")
    assert parses_config("read_json_object(folder / 'config.json')")
    assert not parses_config("(folder / CONFIG_FILE).is_file()")


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_a_file_leaves_out_have_the_defaults_of_its_family(tmp_path: Path, family: str) -> None:
    given = {"model_type": family, "num_hidden_layers": 3, "head_dim": None, "other": [1]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    found = load_model_config(tmp_path)
    assert found | given == found and found["num_attention_heads"] == 32
    dims = find_model(tmp_path)
    assert (dims.layers, dims.max_len) == (3, found["max_position_embeddings"])


def test_what_is_not_a_config_is_recognised(tmp_path: Path) -> None:
    assert load_model_config(tmp_path, missing_ok=True) == {}
    with pytest.raises(FileNotFoundError):
        load_model_config(tmp_path)
    for content, error in (("{", ValueError), ("[]", TypeError)):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(error):
            load_model_config(tmp_path, missing_ok=True)
    (tmp_path / "config.json").write_text('{"model_type": ["none"], "hidden_size": 8}')
    assert load_model_config(tmp_path) == {"model_type": ["none"], "hidden_size": 8}, "an unknown family"
