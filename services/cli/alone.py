"""`diptych worker`, `diptych gateway`, `diptych keys`: the parts by themselves, for containers and other schedulers."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from diptych.errors import ConfigError, DiptychError
from diptych.keys import make_keys
from diptych.load import Loaded
from diptych.load import keys as api_keys
from services.cli.model import find
from services.cli.plan import gateway_spec, worker_spec
from services.cli.ports import claim
from services.cli.stop import FAILED, INTERRUPTED, OK, USAGE, Stop
from services.cluster.environment import child_environ
from services.cluster.supervisor import Status, Supervisor, raised

GRACE_S = 2.0


def keys(folder: Path) -> None:
    """Make the channel keys of a deployment, unless they are there."""
    if (folder / "server.secret").exists():
        print(f"{folder} has keys already; they are left as they are")
        return
    make_keys(folder)
    print(f"keys written to {folder}; give every worker a copy without server.secret")


def worker(loaded: Loaded) -> int:
    """One worker, kept alive until SIGTERM."""
    config = loaded.config
    assert config.role and config.channel and config.keys_dir
    name = config.name or f"{config.role}-{socket.gethostname()}"
    try:
        model = asyncio.run(find(config, 1))
        spec = worker_spec(
            config, model, config.role, name, config.channel, str(config.keys_dir), config.core
        )
    except DiptychError as error:
        return _told(error)
    spec = msgspec.structs.replace(spec, host=config.advertise_host or socket.gethostname())
    return _keep(name, "services.worker", msgspec.json.encode(spec), config.threads, config.drain_s + GRACE_S)


def gateway(loaded: Loaded) -> int:
    """The gateway, kept alive until SIGTERM."""
    config = loaded.config
    assert config.channel and config.keys_dir
    try:
        port = claim(config.host, config.port, loaded.origin("port"))
        spec = gateway_spec(
            config, asyncio.run(find(config, 1)), config.channel, str(config.keys_dir), port, api_keys(loaded)
        )
    except DiptychError as error:
        return _told(error)
    return _keep("gateway", "services.gateway", msgspec.json.encode(spec), 1, config.drain_s + GRACE_S)


def _told(error: DiptychError) -> int:
    print("\n".join(error.lines()), file=sys.stderr)
    return USAGE if isinstance(error, ConfigError) else FAILED


def _keep(name: str, module: str, spec: bytes, threads: int, grace_s: float) -> int:
    # No log file: a part that runs alone writes to standard error, where containers and service managers look.
    environ = child_environ(threads, os.environ)
    supervisor = Supervisor(name, [sys.executable, "-m", module], spec, environ=environ)
    return asyncio.run(_watch(supervisor, grace_s))


async def _watch(supervisor: Supervisor, grace_s: float) -> int:
    stop = Stop()
    stop.listen()
    asked = asyncio.create_task(stop.asked.wait())
    supervisor.start()
    up, seen = False, Status(supervisor.name, version=-1)
    try:
        while not asked.done():
            news = asyncio.create_task(asyncio.to_thread(supervisor.wait, seen.version, 1.0))
            await asyncio.wait({news, asked}, return_when=asyncio.FIRST_COMPLETED)
            status = await news
            if (status.state, status.phase) != (seen.state, seen.phase):
                _line(status)
            if status.state == "failed":
                return _told(raised(status))
            if status.state == "retired":
                return OK
            seen, up = status, up or status.state == "ready"
        return OK if up else INTERRUPTED
    finally:
        asked.cancel()
        await asyncio.to_thread(supervisor.stop, grace_s)


def _line(status: Status) -> None:
    ended = f" ({status.ended})" if status.state == "waiting" else ""
    phase = f" {status.phase}" if status.phase not in ("", status.state) else ""
    Console(stderr=True).print(f"{status.name}: {status.state}{phase}{ended}", markup=False, highlight=False)
