"""What `--bulk` and its flags give, for `diptych plan` and `diptych simulate`: lengths, sizes, measured rates."""

from __future__ import annotations

from pathlib import Path

from diptych.config.values import byte_size
from diptych.errors import ConfigError
from planner.costs.profile_file import load_profile_of
from planner.offload.terms import OffloadWorkload
from planner.types import BulkRates


def read_lengths(text: str | None) -> OffloadWorkload:
    """The lengths of --bulk PROMPT:OUTPUT. Raises ConfigError."""
    parts = (text or "").split(":")
    if len(parts) == 2 and all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        return OffloadWorkload(int(parts[0]), int(parts[1]))
    raise ConfigError(
        f"--bulk {text} cannot be read", "it gives two lengths in tokens", "write --bulk 512:64"
    )


def load_bulk_rates(profile: Path, model: str) -> BulkRates:
    """The rates in a profile. Raises ConfigError: it is of another model, or has none."""
    rates = load_profile_of(profile, model).bulk
    if rates is None:
        raise ConfigError(
            f"the profile {profile} does not say what bulk work costs",
            "that was not measured",
            f"add it: diptych profile {model} --bulk --out {profile}",
        )
    return rates


def read_size(flag: str, text: str) -> float:
    """The bytes that a flag names. Raises ConfigError."""
    try:
        return float(byte_size().parse(text))
    except ValueError as error:
        raise ConfigError(f"{flag} {text} cannot be read", str(error), f"write {flag} 8GiB") from error
