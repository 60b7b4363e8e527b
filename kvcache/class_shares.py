"""Parses `--kv-cache-codec`: one codec, or several with the shares of the KV pool that each gets.

nuq4-1%                 the whole pool
raw:0.25,nuq4-1%        a quarter for raw, the rest for nuq4-1%; raw is the class of requests that ask for none
auto,raw:0.25,nuq4-1%   the same, but for requests that ask for none the router chooses
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.chunks import AUTO_CLASS
from diptych.errors import ConfigError
from kvcache.codecs.codec_id import CodecId, parse_codec_id

FIX = "give each class a share between 0 and 1, at most 1 in all; one may have none and gets the rest: raw:0.25,nuq4-1%"


@dataclass(frozen=True, slots=True)
class ClassShare:
    """A codec as the user named it, and the share of the pool that it gets."""

    codec_id: CodecId
    share: float


def split_auto(text: str) -> tuple[bool, str]:
    """Whether the router chooses for requests that ask for no class, and the codecs behind that word; may be empty."""
    first, _, rest = text.partition(",")
    return (True, rest) if first.strip() == AUTO_CLASS else (False, text)


def parse_class_shares(text: str) -> tuple[ClassShare, ...]:
    """The codecs of a worker, the default one first. Their shares add up to 1 at most. `split_auto` comes before.

    Raises:
        ConfigError: a codec is unknown or named twice, a share is not a number between 0 and 1, the shares do not
            leave anything for the codec without one, or the only codec has less than the whole pool.
    """
    parts = [part.strip().partition(":") for part in text.split(",")]
    if AUTO_CLASS in (name for name, _, _ in parts):
        what = "auto is no KV codec: only `diptych serve` takes it, as the first word of its list, without a share"
        raise ConfigError(what, f"--kv-cache-codec {text}", "for example auto,raw:0.25,nuq4-1%")
    ids = [parse_codec_id(name) for name, _, _ in parts]
    twice = next((one for one in ids if ids.count(one) > 1), None)
    if twice is not None:
        raise ConfigError(f"the KV codec {twice} is named twice", f"--kv-cache-codec {text}", "name it once")
    shares = [_parse_share(share, text) if colon else None for _, colon, share in parts]
    given, open_ = sum(share for share in shares if share is not None), shares.count(None)
    if open_ > 1 or given > 1 + 1e-9 or (open_ and given > 1 - 1e-9):
        what = f"the shares of the KV pool add up to {given:g}, and {open_} classes have none"
        raise ConfigError(what, f"--kv-cache-codec {text}", FIX)
    if len(ids) == 1 and shares[0] not in (None, 1.0):
        what = f"the only KV codec, {ids[0]}, has the share {given:g} of the KV pool"
        raise ConfigError(
            what, f"--kv-cache-codec {text}", "leave out the share, or name a codec for the rest"
        )
    return tuple(
        ClassShare(one, 1 - given if share is None else share) for one, share in zip(ids, shares, strict=True)
    )


def _parse_share(share: str, text: str) -> float:
    try:
        value = float(share)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ConfigError(f"{share!r} is not a share of the KV pool", f"--kv-cache-codec {text}", FIX)
    return value
