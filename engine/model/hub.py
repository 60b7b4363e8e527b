"""Downloads models from the Hugging Face hub. Imported only for a model that is named by a hub id."""

from __future__ import annotations

from collections.abc import Sequence

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

ETAG_TIMEOUT_S = 5
# Besides OSError.
HUB_ERRORS = (
    HFValidationError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)


def fetch_snapshot(name: str, revision: str | None, patterns: Sequence[str]) -> str:
    """The local folder of a hub model; files that match `patterns` are downloaded if they are not cached.

    Raises:
        HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError: it cannot be found.
    """
    return str(
        snapshot_download(name, revision=revision, allow_patterns=list(patterns), etag_timeout=ETAG_TIMEOUT_S)
    )
