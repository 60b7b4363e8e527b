"""Names of codecs: what a user writes (`nuq4-1%`) and the canonical id (`nuq4-1%.g128@0123456789abcdef`).

    NAME [.gGROUP] [.sSEED] [@CALIBRATION]

GROUP is the number of values that share a scale, SEED chooses the signs of the random rotation, CALIBRATION is the hash
of the constants of `nuq*`, or of the factors of `int*` and `tq*`, if there are any. Two pages can be exchanged exactly
when their canonical ids are equal. This file imports no NumPy, so that configuration and planning can read ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from diptych.errors import ConfigError

PLAIN, GROUPED, CALIBRATED, ROTATED = "plain", "grouped", "calibrated", "rotated"

# Number of bits of a key's code and of a value's code.
CODE_BITS = {
    "raw": (32, 32),
    "bf16": (16, 16),
    "fp16": (16, 16),
    "fp8": (8, 8),
    "int8": (8, 8),
    "int4": (4, 4),
    "nuq4": (4, 4),
    "nuq3": (3, 3),
    "nuq2": (2, 2),
    "nuq4-1%": (4, 4),
    "nuq3-1%": (3, 3),
    "nuq2-1%": (2, 2),
    "tq4": (4, 4),
    "tq3": (3, 3),
    "tq-k8v4": (8, 4),
}
FAMILY_PREFIXES = {"int": GROUPED, "nuq": CALIBRATED, "tq": ROTATED}

# Default number of values per group (FlexGen, section 5).
MAX_INT_GROUP = 64
DEFAULT_SEED = 0
# Number of hex characters of a calibration's hash in an id.
HASH_CHARS = 16
MAX_ID_CHARS = 80
# Most values per group, since an outlier's index has at most 16 bits.
MAX_GROUP = 1 << 16

_PATTERN = re.compile(
    r"(?P<name>[a-z0-9%-]+?)"
    r"(\.g(?P<group>[1-9][0-9]{0,4}))?"
    r"(\.s(?P<seed>0|[1-9][0-9]{0,8}))?"
    rf"(@(?P<calibration>[0-9a-f]{{{HASH_CHARS}}}))?"
)


@dataclass(frozen=True, slots=True)
class CodecId:
    """A codec's name and its parameters; `str` gives the id as text.

    `group` is the number of values that share a scale: of one token and head for `int*`, of one token and all heads of
    a page for `nuq*`. A parameter that the family does not have is None, and so is one that was not given yet.
    """

    name: str
    group: int | None = None
    seed: int | None = None
    calibration: str | None = None

    def __str__(self) -> str:
        group = "" if self.group is None else f".g{self.group}"
        seed = "" if self.seed is None else f".s{self.seed}"
        return f"{self.name}{group}{seed}" + ("" if self.calibration is None else f"@{self.calibration}")

    @property
    def family(self) -> str:
        """`plain`, `grouped` (int), `calibrated` (nuq) or `rotated` (tq)."""
        prefix = re.match("[a-z]*", self.name)
        return FAMILY_PREFIXES.get(prefix.group() if prefix else "", PLAIN)

    @property
    def takes_factors(self) -> bool:
        """Whether a calibration may have factors per channel for it (`kvcache.codecs.basis`)."""
        return self.family in (GROUPED, ROTATED)

    @property
    def has_outliers(self) -> bool:
        """Whether a page has slots for outliers."""
        return self.name.endswith("-1%")

    @property
    def code_bits(self) -> tuple[int, int]:
        """Bits of the code of one key and of one value, without scales and outliers."""
        return CODE_BITS[self.name]


@lru_cache(maxsize=64)
def parse_codec_id(text: str) -> CodecId:
    """Reads an id, canonical or with parameters left out.

    Raises:
        ConfigError: it is not an id of a known codec, or has a parameter that its family does not have.
    """
    if "," in text or ":" in text:
        what = f"{text[:MAX_ID_CHARS]!r} is not a single KV codec"
        raise ConfigError(
            what, "only `diptych serve` takes several, each with its share", "name one: nuq4-1%"
        )
    known = f"known codecs: {', '.join(CODE_BITS)}"
    match = _PATTERN.fullmatch(text) if len(text) <= MAX_ID_CHARS else None
    if match is None or match["name"] not in CODE_BITS:
        raise ConfigError(f"{text[:MAX_ID_CHARS]!r} is not a KV codec", known, "for example nuq4-1%")
    codec_id = CodecId(
        match["name"],
        None if match["group"] is None else int(match["group"]),
        None if match["seed"] is None else int(match["seed"]),
        match["calibration"],
    )
    _check_parameters(codec_id)
    return codec_id


def _check_parameters(codec_id: CodecId) -> None:
    family = codec_id.family
    useless = {
        "a group (.g)": codec_id.group is not None and family in (PLAIN, ROTATED),
        "a seed (.s)": codec_id.seed is not None and family != ROTATED,
        "a calibration (@)": codec_id.calibration is not None and family == PLAIN,
    }
    for parameter, refused in useless.items():
        if refused:
            raise ConfigError(
                f"the KV codec {codec_id.name} has no parameter {parameter}, but got {codec_id}"
            )
    if codec_id.group is not None and codec_id.group > MAX_GROUP:
        raise ConfigError(
            f"a group of {codec_id.group} values is too large", f"at most {MAX_GROUP} are possible"
        )


def complete_codec_id(
    codec_id: CodecId, kv_heads: int, head_dim: int, calibration: str | None = None
) -> CodecId:
    """The canonical id for a model: parameters that were left out get their defaults.

    Args:
        codec_id: as the user gave it.
        kv_heads: KV heads of the model; all of them form the group of a calibrated codec unless the id says otherwise.
        head_dim: values of a head.
        calibration: hash of what the calibration at hand has for the codec, if it has anything
            (`kvcache.codecs.calibration.Calibration.digest_for`).

    Raises:
        ConfigError: the group does not fit the model, a calibrated codec has no calibration, or the id names another.
    """
    _check_parameters(codec_id)
    if codec_id.takes_factors:
        if codec_id.calibration is not None and codec_id.calibration != calibration:
            raise _other_calibration_error(codec_id, calibration)
        codec_id = replace(codec_id, calibration=calibration)
    if codec_id.family == GROUPED:
        group = codec_id.group or min(MAX_INT_GROUP, head_dim)
        if head_dim % group:
            raise ConfigError(
                f"{codec_id} cannot divide heads of {head_dim} values into groups of {group}",
                fix="choose a group that divides the head, for example "
                f"{codec_id.name}.g{_largest_divisor(head_dim, MAX_INT_GROUP)}",
            )
        return replace(codec_id, group=group)
    if codec_id.family == ROTATED:
        return replace(codec_id, seed=DEFAULT_SEED if codec_id.seed is None else codec_id.seed)
    if codec_id.family == CALIBRATED:
        return _complete_calibrated(codec_id, kv_heads, head_dim, calibration)
    return codec_id


def _complete_calibrated(codec_id: CodecId, kv_heads: int, head_dim: int, calibration: str | None) -> CodecId:
    if calibration is None:
        raise ConfigError(
            f"the KV codec {codec_id} needs a calibration of this model, and there is none",
            fix="use a codec that needs none, for example tq4",
        )
    if codec_id.calibration not in (None, calibration):
        raise _other_calibration_error(codec_id, calibration)
    group = codec_id.group or kv_heads * head_dim
    if group % head_dim or kv_heads * head_dim % group or group > MAX_GROUP:
        raise ConfigError(
            f"{codec_id} cannot divide {kv_heads} KV heads of {head_dim} values into groups of {group}",
            "a group is a whole number of heads that divides them evenly",
            f"for example {codec_id.name}.g{kv_heads * head_dim}",
        )
    return replace(codec_id, group=group, calibration=calibration)


def _other_calibration_error(codec_id: CodecId, calibration: str | None) -> ConfigError:
    at_hand = f"has the hash {calibration}" if calibration else f"has no factors for {codec_id.name}"
    return ConfigError(
        f"the KV codec {codec_id} was made with another calibration",
        f"the calibration at hand {at_hand}",
        "use the calibration file that the id names",
    )


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)
