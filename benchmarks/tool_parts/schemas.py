"""Random tools, whose arguments have an end: texts, lists and numbers are bounded."""

from __future__ import annotations

import random
from typing import Any

MAX_LEVELS, MAX_FIELDS, MAX_TOOLS = 3, 4, 4


def random_schema(rng: random.Random, level: int = 0) -> dict[str, Any]:
    """The schema of a value; objects and lists have values of their own."""
    kinds = ["string", "enum", "integer", "number", "boolean", "null", "const"]
    kind = rng.choice(kinds if level == MAX_LEVELS else [*kinds, "object", "array", "anyOf"])
    match kind:
        case "string":
            return {"type": "string", "maxLength": rng.randrange(1, 9)}
        case "enum":
            return {"type": "string", "enum": rng.sample(["celsius", "kelvin", "a b", "é", '"', "</x>"], 3)}
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1000)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.randrange(1, 9)}
        case "const":
            return {"const": rng.choice(["fixed", 7, True])}
        case "object":
            return random_object(rng, level + 1)
        case "array":
            return {"type": "array", "items": random_schema(rng, level + 1), "maxItems": rng.randrange(4)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, level + 1) for _ in range(2)]}
        case _:
            return {"type": kind}


def random_object(rng: random.Random, level: int = 0) -> dict[str, Any]:
    """The schema of an object whose fields are known."""
    names = rng.sample(
        ["city", "days", "unit", "a b", "x", "list", "naïve", "deep"], rng.randrange(MAX_FIELDS + 1)
    )
    fields = {name: random_schema(rng, level) for name in names}
    needed = [name for name in fields if rng.random() < 0.6]
    return {"type": "object", "properties": fields, "required": needed, "additionalProperties": False}


def random_tools(rng: random.Random) -> list[dict[str, Any]]:
    """Some tools in the form of OpenAI's API."""
    return [
        {"type": "function", "function": {"name": f"tool_{number}", "parameters": random_object(rng)}}
        for number in range(rng.randrange(1, MAX_TOOLS + 1))
    ]


def wide_tools(num_tools: int, num_arguments: int) -> list[dict[str, Any]]:
    """As many tools with as many arguments, each with a description, none with the arguments of another one."""
    return [_wide_tool(number, num_arguments) for number in range(num_tools)]


def _wide_tool(number: int, num_arguments: int) -> dict[str, Any]:
    fields = {
        f"argument_{i}_{number}": {
            "type": ("string", "integer", "boolean", "number")[i % 4],
            "description": "What it is for",
        }
        for i in range(num_arguments)
    }
    parameters = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": f"tool_{number}", "description": "What it does", "parameters": parameters},
    }
