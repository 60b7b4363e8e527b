"""What a worker with an engine of its own says that it knows and continues (`diptych.messages.Hello.traits`)."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.request import SEGMENTS, TRAITS


def list_traits(engine: object, keep_classes: Sequence[str]) -> tuple[str, ...]:
    """The traits of a worker whose engine has a runner; `keep_classes` are those in which it can evict."""
    cuts_kept = bool(keep_classes) and getattr(getattr(engine, "runner", None), "cuts_kept", False)
    return (*TRAITS, SEGMENTS) if cuts_kept else TRAITS
