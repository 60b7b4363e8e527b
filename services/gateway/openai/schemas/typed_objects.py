"""Objects whose fields depend on their `type`, with a class for each kind.

msgspec's unions of tagged classes take neither an object without a type nor types that nobody has listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec


class TypedObject:
    """What a schema names. `kinds` are the classes of the types that are read; an object without a type is of None.

    All other types are of the class `other`, which has their type alone: what else they have is nobody's concern. With
    a class `word` it may also be a text, its one field.
    """

    __slots__ = ()
    kinds: ClassVar[Mapping[str | None, type[msgspec.Struct]]] = {}
    other: ClassVar[type[msgspec.Struct]]
    word: ClassVar[type[msgspec.Struct] | None] = None

    @classmethod
    def all_kinds(cls) -> list[type[msgspec.Struct]]:
        """The classes that an object may be of."""
        return list(dict.fromkeys([*cls.kinds.values(), cls.other]))


def read_typed(kind: type[Any], found: Any) -> Any:
    """Decode what a schema says is a `kind`: the `dec_hook` of msgspec.

    Raises:
        ValueError: it is none; msgspec adds where it was found.
        NotImplementedError: `kind` is no `TypedObject`.
    """
    if not issubclass(kind, TypedObject):
        raise NotImplementedError(f"schemas have no {kind.__name__}")
    if kind.word is not None and isinstance(found, str):
        return kind.word(found)
    if not isinstance(found, dict):
        raise ValueError("Expected `object`")
    name = found.get("type")
    chosen = kind.kinds.get(name, kind.other) if name is None or isinstance(name, str) else kind.other
    try:
        return msgspec.convert(found, chosen, dec_hook=read_typed)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def show_type(item: TypedObject) -> str:
    """The type of an object that is not read, as errors show it."""
    return f"'{getattr(item, 'type', '')[:40]}'"
