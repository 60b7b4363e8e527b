"""The JSON Schemas in docs are those of the files that are read and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.costs.profile_file import PROFILE_FOLDER, load_profile, save_profile
from services.cli.serve.file_schemas import MODELS, render_schema

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", MODELS)
def test_schemas_are_current(name: str) -> None:
    assert (DOCS / f"{name}.schema.json").read_text(encoding="utf-8") == render_schema(name), (
        "run `make docs`"
    )


def test_schemas_say_what_may_be_written() -> None:
    plan = json.loads(render_schema("plan"))
    assert plan["additionalProperties"] is False and plan["properties"]["version"]["const"] == 1
    assert plan["$defs"]["PlanPool"]["properties"]["role"]["enum"] == ["prefill", "decode", "both"]
    assert plan["$defs"]["PlanPool"]["properties"]["tp"]["exclusiveMinimum"] == 0
    assert "Infinity" not in render_schema("profile")


@pytest.mark.parametrize("path", sorted(PROFILE_FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_profiles_of_the_first_version_are_read_and_written(path: Path, tmp_path: Path) -> None:
    profile = load_profile(path)
    save_profile(profile, tmp_path / "again.json")
    assert load_profile(tmp_path / "again.json") == profile
