"""`diptych worker`, `diptych gateway`, `diptych keys`: the parts by themselves, for containers and other schedulers."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from diptych.channel.keys import copy_worker_keys, make_client_key, make_keys
from diptych.config.load import LoadedConfig, collect_api_keys, with_operator_keys
from diptych.errors import ConfigError, DiptychError
from services.cli.serve.signals import StopSignals
from services.cli.serve.specs import check_certificate, gateway_spec, worker_spec
from services.host.child_environment import child_environment
from services.host.exit_codes import FAILED, INTERRUPTED, OK, USAGE
from services.host.model_probe import resolve_model
from services.host.network import ucx_listen_environment
from services.host.ports import claim_port
from services.host.supervision.supervisor import ChildStatus, Supervisor, start_error
from services.host.vllm.interpreter import OWN_MODULE, worker_command, worker_environment

GRACE_S = 2.0


def write_keys(
    folder: Path,
    workers: Path | None = None,
    api_key_file: Path | None = None,
    metrics_key_file: Path | None = None,
    admin_key_file: Path | None = None,
) -> None:
    """Make the channel keys of a deployment, unless they are there; write what workers need of them to `workers`.

    `api_key_file`, `metrics_key_file` and `admin_key_file` get a new key each, unless they are there. They are for this
    user alone (mode 0600); that for metrics is for the group, too (0640), since a Prometheus may run as another user.

    Raises:
        ConfigError: a folder cannot be written, or holds a key that is not this user's alone.
    """
    if (folder / "server.secret").exists():
        print(f"{folder} has keys already; they are left as they are")
    else:
        make_keys(folder)
        print(f"keys written to {folder}")
    if workers is None:
        print(f"for workers: a copy of {folder} without server.secret (--workers DIR writes one)")
    else:
        copy_worker_keys(folder, workers)
        print(f"what workers need of them written to {workers}")
    for file, mode in ((api_key_file, 0o600), (metrics_key_file, 0o640), (admin_key_file, 0o600)):
        if file is not None:
            made = make_client_key(file, mode)
            print(f"a new key written to {file}" if made else f"{file} is there; it is left as it is")


def run_worker(loaded: LoadedConfig) -> int:
    """One worker, kept alive until SIGTERM."""
    config = loaded.config
    assert config.role and config.channel and config.keys_dir
    name = config.name or f"{config.role}-{socket.gethostname()}"
    try:
        model = asyncio.run(resolve_model(config, config.host_workers))
        spec = worker_spec(
            config, model, config.role, name, config.channel, str(config.keys_dir), config.core
        )
        environ = ucx_listen_environment(worker_environment(spec, os.environ), config.advertise_host)
    except DiptychError as error:
        return _print_error(error)
    spec = msgspec.structs.replace(spec, host=config.advertise_host or socket.gethostname())
    command = worker_command(spec, OWN_MODULE)
    return _run_supervised(name, command, msgspec.json.encode(spec), environ, config.drain_s + GRACE_S)


def run_gateway(loaded: LoadedConfig) -> int:
    """The gateway, kept alive until SIGTERM."""
    try:
        loaded = with_operator_keys(loaded)
        config = loaded.config
        assert config.channel and config.keys_dir
        port = claim_port(config.host, config.port, loaded.origin_of("port"))
        keys = collect_api_keys(loaded)
        check_certificate(loaded)
        spec = gateway_spec(
            config,
            asyncio.run(resolve_model(config, 0)),
            config.channel,
            str(config.keys_dir),
            port,
            keys.every,
            keys.urgent,
        )
    except DiptychError as error:
        return _print_error(error)
    environ = child_environment(1, os.environ)
    command = [sys.executable, "-m", "services.gateway"]
    return _run_supervised("gateway", command, msgspec.json.encode(spec), environ, config.drain_s + GRACE_S)


def _print_error(error: DiptychError) -> int:
    print("\n".join(error.lines()), file=sys.stderr)
    return USAGE if isinstance(error, ConfigError) else FAILED


def _run_supervised(
    name: str, command: list[str], spec: bytes, environ: dict[str, str], grace_s: float
) -> int:
    # There is no log file: a part that runs alone writes to standard error, where containers and service managers
    # look.
    supervisor = Supervisor(name, command, spec, environ=environ)
    return asyncio.run(_watch_supervisor(supervisor, grace_s))


async def _watch_supervisor(supervisor: Supervisor, grace_s: float) -> int:
    stop = StopSignals()
    stop.listen_signals()
    asked = asyncio.create_task(stop.stop_asked.wait())
    supervisor.start()
    up, last = False, ChildStatus(supervisor.name, version=-1)
    try:
        while not asked.done():
            news = asyncio.create_task(asyncio.to_thread(supervisor.wait_status, last.version, 1.0))
            await asyncio.wait({news, asked}, return_when=asyncio.FIRST_COMPLETED)
            status = await news
            if (status.state, status.phase) != (last.state, last.phase):
                _print_status(status)
            if status.state == "failed":
                return _print_error(start_error(status))
            if status.state == "retired":
                return OK
            last, up = status, up or status.state == "ready"
        return OK if up else INTERRUPTED
    finally:
        asked.cancel()
        await asyncio.to_thread(supervisor.stop, grace_s)


def _print_status(status: ChildStatus) -> None:
    ended = f" ({status.ended})" if status.state == "waiting" else ""
    phase = f" {status.phase}" if status.phase not in ("", status.state) else ""
    Console(stderr=True).print(f"{status.name}: {status.state}{phase}{ended}", markup=False, highlight=False)
