"""The JSON Schemas of plan and profile files: docs/plan.schema.json and docs/profile.schema.json.

`python -m services.cli.serve.file_schemas plan` prints one; a test asserts that the files in docs are current.
"""

from __future__ import annotations

import json
import sys

from planner.costs.profile_file import ProfileFile
from planner.json_file import FileModel, json_schema
from planner.placement.plan_file import PlanFile

MODELS: dict[str, type[FileModel]] = {"plan": PlanFile, "profile": ProfileFile}


def render_schema(name: str) -> str:
    """docs/NAME.schema.json. Raises KeyError: there is no file of that name."""
    return json.dumps(json_schema(MODELS[name], f"diptych {name}"), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(render_schema(sys.argv[1]), end="")
