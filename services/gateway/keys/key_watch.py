"""Watches the file of `--keys`, and accepts its new keys once it is replaced.

A new file under the same name (`mv`, or a secret that an orchestrator mounts) counts at once. A file that is written
over counts when it has not changed for a moment, so that no half of it is read. A file that is wrong changes nothing:
its problem is logged once, and is in `/status` until it is mended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from diptych.errors import ConfigError
from diptych.keys.named_key import NamedKey
from services.gateway.keys.named_keys import NamedKeys
from services.host.watched_files import LOOK_S, WatchedFiles

# How often a file is looked at for one tenant: a file that is written over counts when two looks see the same.
NUM_LOOKS = 5

log = logging.getLogger(__name__)


class KeyFileWatch:
    """Keeps `keys` as their file says. `problem` is what is wrong with the file now; empty if nothing is."""

    def __init__(self, files: WatchedFiles, keys: NamedKeys) -> None:
        self.keys, self.problem = keys, ""
        self.loaded_s = time.monotonic()
        self._files, [self.path] = files, files.paths
        # One look at a time: a second one would see no change before the first has read the file.
        self._looking = asyncio.Lock()
        # One search for tenants at a time, and when the latest one began (monotonic seconds).
        self._searching, self._searched_s = asyncio.Lock(), 0.0

    async def run_forever(self) -> None:
        """Look at the file, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Accept the keys of the file, if it is another one than before."""
        async with self._looking:
            await self._look()

    async def wait_for_tenant(self, tenant: str) -> None:
        """Look until a tenant is accepted that another process has found in the file already, or for a moment.

        What others found meanwhile counts, so many who wait take two moments at most.
        """
        asked_s = time.monotonic()
        async with self._searching:
            if self._searched_s > asked_s:
                return
            self._searched_s = time.monotonic()
            for _ in range(NUM_LOOKS):
                await self.look()
                if self.keys.accepts_tenant(tenant):
                    return
                await asyncio.sleep(LOOK_S / NUM_LOOKS)

    async def _look(self) -> None:
        if not await asyncio.to_thread(self._files.have_changed):
            return
        try:
            entries = await asyncio.to_thread(load_keys, self.path, self.keys.plain_digests)
        except ConfigError as error:
            self.problem = " ".join(" ".join(error.lines()).split())
            log.error("%s keeps the keys that it had: %s", self.path, self.problem)
            return
        before_names = {rates.key.name for rates in self.keys.rates}
        self.keys.replace_keys(entries)
        self.problem, self.loaded_s = "", time.monotonic()
        names = {entry.name for entry in entries}
        log.warning(
            "%d keys of %s are accepted; new: %s; gone: %s",
            len(entries),
            self.path,
            ", ".join(sorted(names - before_names)) or "none",
            ", ".join(sorted(before_names - names)) or "none",
        )

    def report(self, with_names: bool, now_s: float) -> dict[str, Any]:
        """The part of `/status` about the file. The names and what they have used are in it only `with_names`."""
        report: dict[str, Any] = {
            "count": len(self.keys) - len(self.keys.plain_digests),
            "age_s": round(now_s - self.loaded_s, 3),
            "problem": self.problem or None,
        }
        if with_names:
            report["names"] = [
                {
                    "name": rates.key.name,
                    "priority": rates.key.priority,
                    "requests": rates.use.requests,
                    "prompt_tokens": rates.use.prompt_tokens,
                    "generated_tokens": rates.use.generated_tokens,
                    "refused": dict(rates.use.refused),
                    "per_minute": {
                        name: {"limit": window.limit, "used": window.used(now_s)}
                        for name, window in rates.windows.items()
                    },
                }
                for rates in self.keys.rates
            ]
        return report


def load_keys(path: Path, taken: frozenset[bytes]) -> tuple[NamedKey, ...]:
    """The keys of the file; `taken` are digests of keys that are set elsewhere. Raises ConfigError if it is wrong."""
    # Imported only here, since it imports PyYAML, which a gateway without a key file does not need.
    from diptych.keys.key_file import read_key_file

    return read_key_file(path, taken=taken)


def open_named_keys(path: str, plain: tuple[str, ...]) -> KeyFileWatch:
    """The keys of a file beside `plain` ones, which are watched. Raises ConfigError if the file is wrong."""
    files, keys = WatchedFiles(Path(path)), NamedKeys((), plain)
    keys.replace_keys(load_keys(files.paths[0], keys.plain_digests))
    return KeyFileWatch(files, keys)
