"""KV classes: which workers can exchange KV, and the pool of each class (pure).

A class is a codec with its parameters and its calibration, or `RAW_CLASS`. A worker's `Hello` lists the classes that it
has a pool for. KV of one class can be read by no other, so an answer stays with the class that it began in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from diptych.chunks import AUTO_CLASS, RAW_CLASS
from diptych.eviction_spec import ADA, FASTGEN, follows_rule
from diptych.messages import Hello

# Where an id is divided into its name and its parameters.
ID_PARTS = re.compile(r"(?=[.@])")
# How names of codecs begin that always have a calibration. Others may have one, so that an id of theirs is whole
# without it: `int4.g32` is another class than `int4.g32@0123456789abcdef`.
CALIBRATED_PREFIX = "nuq"


class KvPoolSize(NamedTuple):
    """The pool that a worker has for one class: its slabs, and the bytes of one chunk, which is the size of a slab."""

    num_slabs: int
    chunk_bytes: int


class ServedClasses(NamedTuple):
    """The KV classes that requests may ask for, those of them among which the router may choose, and those in which
    KV can be evicted, with the rules by which all workers can that evict.

    `default` is the class of a request that asks for none: an id, or `AUTO_CLASS`; None if workers differ.
    """

    served: list[str]
    auto: list[str]
    keep: list[str] = []
    default: str | None = None
    rules: Sequence[str] = (ADA, FASTGEN)


class AnswerVersion(NamedTuple):
    """What must stay the same while an answer is generated: the model's fingerprint, and the KV class."""

    fingerprint: str
    kv_class: str


def classes_of(hello: Hello) -> Mapping[str, tuple[int, int]]:
    """The classes that a worker has a pool for -> number of slabs, and bytes of a chunk."""
    return hello.kv_classes or {RAW_CLASS: (hello.num_slabs, hello.chunk_bytes)}


@lru_cache(maxsize=1024)
def names_class(asked: str, kv_class: str) -> bool:
    """Whether `asked` is the id of the class, its codec's name with some of the id's parameters, or `AUTO_CLASS`.

    An id is NAME[.gGROUP][.sSEED][@CALIBRATION], see `kvcache.codecs.codec_id`. One with a group or seed and without a
    calibration names no class that has factors of a calibration.
    """
    if asked in (kv_class, AUTO_CLASS):
        return True
    (name, *given), (codec, *parameters) = (ID_PARTS.split(one) for one in (asked, kv_class))
    rest = iter(parameters)
    # In the order of the id, each at most once.
    fits = name == codec and all(one in rest for one in given)
    is_whole = bool(given) and not codec.startswith(CALIBRATED_PREFIX)
    return fits and (not is_whole or _has_calibration(given) == _has_calibration(parameters))


def _has_calibration(parameters: list[str]) -> bool:
    return any(one.startswith("@") for one in parameters)


def holds_class(hello: Hello, kv_class: str | None) -> bool:
    """Whether the worker has a pool for a class that `kv_class` names; every worker does if it is None."""
    classes = classes_of(hello)
    return kv_class is None or kv_class in classes or any(names_class(kv_class, name) for name in classes)


def can_evict(hello: Hello, kv_class: str | None, rule: str = "") -> bool:
    """Whether the worker can drop KV by head (`diptych.eviction_spec`) in a class that `kv_class` names, or in any; and
    by `rule`, or by any.
    """
    if rule and not any(follows_rule(rule, one) for one in hello.keep_rules):
        return False
    return any(kv_class is None or names_class(kv_class, name) for name in hello.keep_classes)


def keep_classes_of_pair(source: Hello | None, target: Hello) -> list[str]:
    """The classes in which a pair of workers can evict; `source` is None if `target` also prefills."""
    names = list(classes_of(target)) if source is None else shared_classes(target, source)
    both = [target] if source is None else [target, source]
    return [name for name in names if all(name in hello.keep_classes for hello in both)]


def loss_of(hello: Hello, kv_class: str) -> float | None:
    """By how many percent perplexity grows with the class, as the worker's calibration says; None if it does not.

    `raw` loses nothing. A measured gain is noise, and counts as no loss.
    """
    if kv_class == RAW_CLASS:
        return 0.0
    loss = hello.kv_losses.get(kv_class)
    return None if loss is None else max(0.0, loss)


def shared_classes(left: Hello, right: Hello) -> list[str]:
    """The classes that both workers have, in the order of `left`."""
    theirs = classes_of(right)
    return [name for name in classes_of(left) if name in theirs]


def share_class(left: Hello, right: Hello, kv_class: str | None) -> bool:
    """Whether both workers have one class that `kv_class` names; None names every class."""
    return any(kv_class is None or names_class(kv_class, name) for name in shared_classes(left, right))


def can_exchange_kv(left: Hello, right: Hello) -> bool:
    """Whether one of the two workers can read KV of the other: the model is the same, and a class is."""
    return left.fingerprint == right.fingerprint and bool(shared_classes(left, right))


def decided_class(hello: Hello, kv_class: str | None) -> str:
    """`kv_class`, or where none is decided yet, the first class of the worker that it may be."""
    classes = classes_of(hello)
    if kv_class is None or kv_class in classes:
        return next(iter(classes)) if kv_class is None else kv_class
    return next((name for name in classes if names_class(kv_class, name)), kv_class)


def pool_size(hello: Hello, kv_class: str | None) -> KvPoolSize:
    """The worker's pool for a class, which it must have; None means its first class."""
    return KvPoolSize(*classes_of(hello)[decided_class(hello, kv_class)])


def saved_chunk_bytes(hello: Hello, kv_class: str) -> int:
    """How many bytes fewer a chunk takes in the class, which the worker has, than without a codec."""
    coded = pool_size(hello, kv_class).chunk_bytes
    return (hello.raw_chunk_bytes or coded) - coded


def versions_of_pair(source: Hello | None, target: Hello, kv_class: str | None = None) -> list[AnswerVersion]:
    """The versions of answers that a pair of workers can generate; `source` is None if `target` also prefills.

    With a `kv_class`, only those of classes that it names.
    """
    names = list(classes_of(target)) if source is None else shared_classes(target, source)
    return [
        AnswerVersion(target.fingerprint, name)
        for name in names
        if kv_class is None or names_class(kv_class, name)
    ]


def class_is_gone(version: AnswerVersion, hellos: Iterable[Hello], roles: Collection[str]) -> bool:
    """Whether the workers that can continue an answer of `version` are gone for good, since the class was replaced.

    Args:
        version: of the answer.
        hellos: of the workers that are up, and the last one of each lost worker, which may come back unchanged.
        roles: a worker of each of them is needed.
    """
    rest = list(hellos)
    if all(holds_class(hello, version.kv_class) for hello in rest):
        # No worker has replaced the class.
        return False
    fitting = [
        hello
        for hello in rest
        if hello.fingerprint == version.fingerprint and holds_class(hello, version.kv_class)
    ]
    return not {hello.role for hello in fitting}.issuperset(roles)


def have_shared_class(hellos: Collection[Hello]) -> bool:
    """Whether any class is held by a prefill worker and by a decode worker."""
    prefill, decode = (
        {name for hello in hellos if hello.role == role for name in classes_of(hello)}
        for role in ("prefill", "decode")
    )
    return not prefill.isdisjoint(decode)


def describe_classes(hellos: Collection[Hello]) -> str:
    """The classes of the workers by role, for errors: "decode workers have raw, prefill workers have int8.g64"."""
    classes: dict[str, set[str]] = {}
    for hello in hellos:
        classes.setdefault(hello.role, set()).update(classes_of(hello))
    listed = [f"{role} workers have {' and '.join(sorted(classes[role]))}" for role in sorted(classes)]
    return ", ".join(listed) or "no worker is up"
