"""Which KV class an answer had, why, and what that saved."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.chunks import RAW_CLASS
from router.routing.class_choice import DEFAULT


@dataclass(slots=True)
class KvClassRecord:
    """The KV class of a sequence, why it has it (`router.routing.class_choice`), and how many bytes fewer a token takes
    than without a codec.
    """

    kv_class: str = RAW_CLASS
    reason: str = DEFAULT
    saved_bytes_per_token: int = 0
