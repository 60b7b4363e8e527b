"""Structs as text: what a message or a line of a file looks like to the program that reads it.

    Prefill (array, tag "Prefill")
      0 request: str
      1 epoch: int

The order of an array's fields is its format. A struct is named by its class, never by its module.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import product
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect

WithFields = inspect.StructType | inspect.DataclassType | inspect.NamedTupleType | inspect.TypedDictType
Items = (
    inspect.ListType | inspect.VarTupleType | inspect.SetType | inspect.FrozenSetType | inspect.CollectionType
)
BOUNDS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")
# None of them is empty, since programs leave out what is empty. The number is also one of tokens of a whole chunk.
EXAMPLES: Mapping[Any, Any] = {str: "x", int: 64, float: 0.5, bool: True, bytes: b"x"}


def describe_structs(roots: Iterable[Any]) -> list[str]:
    """The lines of all structs that these types contain, sorted by name."""
    found: dict[type[Any], WithFields] = {}
    for root in inspect.multi_type_info(roots):
        _find_structs(root, found)
    by_name = sorted(found.values(), key=lambda one: one.cls.__name__)
    return [line for one in by_name for line in _describe_struct(one)]


def union_names(union: Any) -> list[str]:
    """The names of a union's classes, sorted."""
    return sorted(cls.__name__ for cls in get_args(union))


def _find_structs(kind: inspect.Type, found: dict[type[Any], WithFields]) -> None:
    """Add to `found` every class with fields that `kind` leads to."""
    if isinstance(kind, WithFields):
        if kind.cls in found:
            return
        found[kind.cls] = kind
    for part in _parts_of(kind):
        _find_structs(part, found)


def _parts_of(kind: inspect.Type) -> Iterator[inspect.Type]:
    match kind:
        case inspect.Metadata(type=inner):
            yield inner
        case inspect.UnionType(types=parts):
            yield from parts
        case inspect.DictType(key_type=key, value_type=value):
            yield from (key, value)
        case inspect.TupleType(item_types=parts):
            yield from parts
        case _ if isinstance(kind, Items):
            yield kind.item_type
        case _ if isinstance(kind, WithFields):
            yield from (field.type for field in kind.fields)


def _describe_struct(kind: WithFields) -> list[str]:
    is_array = isinstance(kind, inspect.NamedTupleType)
    traits = []
    if isinstance(kind, inspect.StructType):
        is_array = kind.array_like
        config = kind.cls.__struct_config__
        traits += [f"tag {kind.tag!r}" if is_array else f"{kind.tag_field} {kind.tag!r}"] if kind.tag else []
        traits += ["omits defaults"] if config.omit_defaults else []
        traits += ["no other fields"] if kind.forbid_unknown_fields else []
    lines = [f"{kind.cls.__name__} ({', '.join(['array' if is_array else 'object', *traits])})"]
    for number, field in enumerate(kind.fields):
        place = f"{number} " if is_array else ""
        lines.append(f"  {place}{field.encode_name}: {type_text(field.type)}{_default_text(field)}")
    return lines


def _default_text(field: inspect.Field) -> str:
    default = field.default
    if default is msgspec.NODEFAULT:
        if field.default_factory is msgspec.NODEFAULT:
            return "" if field.required else " = …"
        default = field.default_factory()
    return f" = {value_text(default)}"


def value_text(value: Any) -> str:
    """A value as it is sent; infinity and NaN, which JSON cannot express, as Python writes them."""
    if isinstance(value, float):
        return repr(value)
    return msgspec.json.encode(value, order="deterministic").decode()


def type_text(kind: inspect.Type) -> str:
    """A type as Python would write it, with its bounds behind it."""
    bounds = {name: getattr(kind, name, None) for name in BOUNDS}
    given = ", ".join(f"{name} {value}" for name, value in bounds.items() if value is not None)
    return f"{_bare_text(kind)} ({given})" if given else _bare_text(kind)


def _bare_text(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(type=inner):
            return type_text(inner)
        case inspect.UnionType(types=parts):
            return " | ".join(map(type_text, parts))
        case inspect.LiteralType(values=values):
            return " | ".join(map(repr, values))
        case inspect.EnumType(cls=cls):
            return " | ".join(repr(member.value) for member in cls)
        case _ if isinstance(kind, WithFields | inspect.CustomType):
            return kind.cls.__name__
        case inspect.NoneType():
            return "None"
        case _:
            texts = [type_text(part) for part in _parts_of(kind)]
            texts += ["..."] if isinstance(kind, inspect.VarTupleType) else []
            name = type(kind).__name__.removesuffix("Type").removeprefix("Var").lower()
            return f"{name}[{', '.join(texts)}]" if texts else name


def example(kind: Any) -> Any:
    """A value of a type in which nothing is left out: optional parts are there, and nothing is empty."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        given = [meta.examples for meta in args[1:] if isinstance(meta, msgspec.Meta) and meta.examples]
        return given[0][0] if given else example(args[0])
    if origin is Literal:
        return args[0]
    if origin in (Union, types.UnionType):
        return example(next(part for part in args if part is not types.NoneType))
    if origin is tuple:
        return tuple(example(part) for part in args if part is not ...)
    if origin is not None:
        parts = [example(part) for part in args]
        return {parts[0]: parts[1]} if issubclass(origin, Mapping) else parts
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind, include_extras=True)
        return kind(**{name: example(hints[name]) for name in kind.__struct_fields__})
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{field.name: example(hints[field.name]) for field in fields(kind) if field.init})
    return EXAMPLES[kind]


def example_calls(function: Any) -> Iterator[dict[str, Any]]:
    """Arguments to call `function` with: one call for each class that a parameter may be of."""
    hints = {name: kind for name, kind in get_type_hints(function).items() if name != "return"}
    choices = [[*_alternatives(kind)] for kind in hints.values()]
    for chosen in product(*choices):
        yield {name: example(kind) for name, kind in zip(hints, chosen, strict=True)}


def _alternatives(kind: Any) -> Iterator[Any]:
    """The types of a union, without None; `kind` itself if it is no union."""
    if get_origin(kind) not in (Union, types.UnionType):
        yield kind
        return
    for part in get_args(kind):
        if part is not types.NoneType:
            yield from _alternatives(part)
