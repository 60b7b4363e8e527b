"""Which connection makes room for a new one, and how many there may be."""

from __future__ import annotations

import resource
import subprocess
import sys

from services.gateway.http.connection_table import (
    ConnectionPhase,
    ConnectionTable,
    max_open_connections,
)
from services.gateway.server import BACKLOG_SHARE, MAX_BACKLOG, backlog_size

LIMIT = """
import resource
from diptych.file_limits import raise_open_file_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
assert raise_open_file_limit() == hard
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


class Connection:
    """Remembers whether it was evicted."""

    def __init__(self) -> None:
        self.evicted = False

    def evict(self) -> None:
        self.evicted = True


def full(*phases: ConnectionPhase) -> tuple[ConnectionTable, list[Connection]]:
    """A table without room, whose connections entered these phases in this order."""
    table, connections = ConnectionTable(len(phases)), [Connection() for _ in phases]
    for connection, phase in zip(connections, phases, strict=True):
        assert table.add_connection(connection)
        table.set_phase(connection, phase)
    return table, connections


def test_the_one_that_is_idle_for_longest_makes_room() -> None:
    table, connections = full(
        ConnectionPhase.SENDING, ConnectionPhase.ANSWERING, ConnectionPhase.IDLE, ConnectionPhase.IDLE
    )
    table.set_phase(connections[2], ConnectionPhase.ANSWERING)
    table.set_phase(
        connections[2], ConnectionPhase.IDLE
    )  # it was used: the other one has been idle for longer
    assert table.add_connection(Connection())
    assert [connection.evicted for connection in connections] == [False, False, False, True]
    assert len(table) == 4


def test_bodies_make_room_when_nothing_is_idle() -> None:
    table, connections = full(ConnectionPhase.ANSWERING, ConnectionPhase.SENDING, ConnectionPhase.SENDING)
    new = Connection()
    assert table.add_connection(new)
    table.set_phase(new, ConnectionPhase.ANSWERING)
    assert table.add_connection(Connection())
    assert [connection.evicted for connection in connections] == [False, True, True]


def test_answers_make_no_room() -> None:
    table, connections = full(ConnectionPhase.ANSWERING, ConnectionPhase.ANSWERING)
    assert not table.add_connection(refused := Connection())
    table.set_phase(refused, ConnectionPhase.SENDING)  # it is not in the table, and does not come in
    assert len(table) == 2 and not any(connection.evicted for connection in connections)
    table.remove_connection(connections[0])
    table.remove_connection(connections[0])
    assert table.add_connection(Connection()) and len(table) == 2


def test_connections_and_backlog_leave_descriptors_for_others() -> None:
    for descriptors in (64, 1024, 20_000, 1 << 20):
        connections, backlog = max_open_connections(4096, descriptors), backlog_size(descriptors)
        assert 1 <= backlog <= MAX_BACKLOG and 1 <= connections <= 4096
        assert connections + backlog < descriptors
    assert max_open_connections(4096, 1024) == 768 and BACKLOG_SHARE < 0.25


def test_the_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    limits = subprocess.run([sys.executable, "-c", LIMIT], capture_output=True, check=True).stdout.split()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert [int(limit) for limit in limits] == [hard, hard]
