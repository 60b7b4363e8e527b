"""The JSON Schema of a YAML file with settings, for editors: docs/configuration.schema.json."""

from __future__ import annotations

import json
from typing import Any

from diptych.config.fields import list_settings
from diptych.config.options import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# The schema of a key without a value, or of a file without keys: the default applies.
NOTHING = {"type": "null"}


def yaml_schema() -> dict[str, Any]:
    """The schema: every key with its description, its default and the values it may have, in both spellings."""
    made = Config.model_json_schema()["properties"]
    properties = {}
    for one in list_settings(Config):
        value = {name: part for name, part in made[one.name].items() if name not in ("title", "description")}
        default = value.pop("default")
        allowed = value.get("anyOf", [value])
        properties[one.name] = {"description": one.help} | ({} if default is None else {"default": default})
        properties[one.name]["anyOf"] = [*(part for part in allowed if part != NOTHING), NOTHING]
    dashed = {name.replace("_", "-"): {"$ref": f"#/properties/{name}"} for name in properties if "_" in name}
    return {
        "$schema": DIALECT,
        "title": "Settings of diptych serve, worker and gateway",
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": properties | dashed,
    }


def render_schema() -> str:
    """The schema as text, as `diptych serve --config-schema` prints it."""
    return json.dumps(yaml_schema(), indent=2, ensure_ascii=False)
