"""The health check of a worker's container: real connections, and what it says of none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from services.host import channel_probe

ROOT = Path(__file__).parents[3]


def check(port: int) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"DIPTYCH_CHANNEL": f"tcp://gateway:{port}"}
    command = [sys.executable, "-m", channel_probe.__name__]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)


def test_it_sees_a_connection_and_its_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused = check(port)
        assert refused.returncode == 1 and f"port {port}" in refused.stderr
        with socket.create_connection(("127.0.0.1", port)):
            taken, _ = server.accept()
            done = check(port)
            assert (done.returncode, done.stderr) == (0, "")
            taken.close()


def test_without_a_channel_it_says_so() -> None:
    assert channel_probe.main({}) == 2 and channel_probe.main({"DIPTYCH_CHANNEL": "gateway"}) == 2


def test_only_the_remote_port_and_established_connections_count(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    head = "  sl  local_address rem_address   st tx_queue rx_queue\n"
    for line, wanted in (
        ("0: 0100007F:1F90 0200007F:1644 01 0:0", True),
        ("0: 0100007F:1644 0200007F:1F90 01 0:0", False),
        ("0: 0100007F:1F90 0200007F:1644 02 0:0", False),
    ):
        table.write_text(head + line + "\n")
        assert channel_probe.is_connected(5700, [table, tmp_path / "missing"]) is wanted
