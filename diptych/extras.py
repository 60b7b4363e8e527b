"""Packages that only some commands need: the extras of pyproject.toml."""

from __future__ import annotations

from importlib.util import find_spec

from diptych.errors import ConfigError

# Extra -> the packages, as they are imported, that it installs.
EXTRAS = {
    "plan": ("scipy", "matplotlib"),
    "dashboards": ("grafana_foundation_sdk",),
    "otel": ("opentelemetry.proto",),
    "gpu": ("pynvml",),
}


def require_extra(extra: str, use: str, instead: str = "") -> None:
    """Check that an extra is installed. Loads none of its packages: it looks only whether they are there.

    Args:
        extra: one of `EXTRAS`.
        use: what needs it, as the subject of a sentence, for example `diptych profile`.
        instead: what to do without it, as the end of the advice; empty if there is nothing.

    Raises:
        ConfigError: a package is not installed. It says how to install the extra.
    """
    missing = [package for package in EXTRAS[extra] if not _is_installed(package)]
    if missing:
        raise ConfigError(
            f"{use} needs packages that are not installed",
            f"there is no {' and no '.join(missing)} in this Python",
            f"pip install 'diptych[{extra}]'{instead}",
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent
        return False
