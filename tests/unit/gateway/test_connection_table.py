"""Which connection makes room for a new one, and how many there may be."""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http import connection_table
from services.gateway.http.connection_table import (
    FRESH_S,
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
    times = itertools.count(step=FRESH_S)
    table, connections = ConnectionTable(len(phases), lambda: next(times)), [Connection() for _ in phases]
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


def test_a_client_that_has_just_come_is_not_replaced_by_the_next_ones() -> None:
    """Its request may still be on its way while others that do not read hold all other places."""
    now_s = [0.0]
    table = ConnectionTable(8, lambda: now_s[0])
    for _ in range(4):
        assert table.add_connection(stranger := Connection())
        table.set_phase(stranger, ConnectionPhase.BLOCKED)
    begin(table, "a", ConnectionPhase.BLOCKED, 3)
    assert table.add_connection(client := Connection())
    now_s[0] = FRESH_S / 2
    for _ in range(7):
        assert table.add_connection(other := Connection())
        table.set_phase(other, ConnectionPhase.ANSWERING)
        assert table.begin_request(other, "b", False)
        assert not client.evicted
    # Nobody else waits for its client any more.
    assert table.add_connection(Connection()) and client.evicted
    # A crowd of idle connections displaces no client that sends or reads.
    table = ConnectionTable(8, lambda: now_s[0])
    uploads = begin(table, "a", ConnectionPhase.SENDING, 3)
    crowd = [Connection() for _ in range(40)]
    assert all(table.add_connection(one) for one in crowd)
    assert not any(one.evicted for one in uploads) and sum(not one.evicted for one in crowd) == 5
    # A connection that has been idle for some time loses nothing.
    table = ConnectionTable(2, lambda: now_s[0])
    assert table.add_connection(idle := Connection()) and table.add_connection(waiting := Connection())
    table.set_phase(waiting, ConnectionPhase.BLOCKED)
    now_s[0] += FRESH_S
    assert table.add_connection(Connection())
    assert idle.evicted and not waiting.evicted


@pytest.mark.parametrize("phase", [ConnectionPhase.SENDING, ConnectionPhase.BLOCKED])
def test_clients_that_wait_make_room_when_nothing_is_idle(phase: ConnectionPhase) -> None:
    table, connections = full(ConnectionPhase.ANSWERING, phase, phase)
    assert table.begin_request(connections[0], "a", False)
    begin(table, "a", ConnectionPhase.ANSWERING)
    assert table.add_connection(Connection())
    assert [connection.evicted for connection in connections] == [False, True, True]


def test_the_one_without_progress_for_longest_makes_room_whatever_it_does() -> None:
    table, connections = full(*[ConnectionPhase.SENDING, ConnectionPhase.BLOCKED] * 3)
    order = [1, 4, 0, 5, 2, 3]
    for number in order:
        table.note_progress(connections[number])
    for number in order:
        assert not connections[number].evicted
        assert table.add_connection(new := Connection())
        table.set_phase(new, ConnectionPhase.ANSWERING)
        assert table.begin_request(new, "a", False)
        assert connections[number].evicted
    assert not table.add_connection(Connection())


def begin(table: ConnectionTable, tenant: str, phase: ConnectionPhase, count: int = 1) -> list[Connection]:
    """Connections of a tenant that are in this phase."""
    begun = [Connection() for _ in range(count)]
    for connection in begun:
        assert table.add_connection(connection)
        table.set_phase(connection, ConnectionPhase.SENDING)
        assert table.begin_request(connection, tenant, False)
        table.set_phase(connection, phase)
    return begun


def test_strangers_make_room_before_tenants_and_the_heaviest_tenant_before_others() -> None:
    table = ConnectionTable(8)
    b = begin(table, "b", ConnectionPhase.BLOCKED, 2)
    a = begin(table, "a", ConnectionPhase.BLOCKED, 3) + begin(table, "a", ConnectionPhase.ANSWERING, 2)
    assert table.add_connection(stranger := Connection())
    table.set_phase(stranger, ConnectionPhase.BLOCKED)
    for expected in [stranger, *a[:3], *b]:
        begin(table, "c", ConnectionPhase.ANSWERING)
        assert expected.evicted
    # All others wait for an answer to a request with a key.
    assert not table.add_connection(Connection())
    # A stranger is one again as soon as a request without a key is answered, and no longer once a key has come.
    assert table.begin_request(a[3], None, True) and table.begin_request(a[4], None, True)
    assert table.begin_request(a[3], "a", True)
    begin(table, "c", ConnectionPhase.ANSWERING)
    assert [one.evicted for one in a[3:]] == [False, True]
    assert not table.add_connection(Connection())


def test_strangers_make_room_before_whoever_has_just_come_even_in_a_crowd() -> None:
    table = ConnectionTable(8, lambda: 0.0)
    strangers = begin(table, "b", ConnectionPhase.ANSWERING, 2)
    for one in strangers:
        table.begin_request(one, None, True)
    crowd = [Connection() for _ in range(6)]
    assert all(table.add_connection(one) for one in crowd)
    for expected in [*strangers, crowd[0]]:
        assert not expected.evicted
        assert table.add_connection(Connection())
        assert expected.evicted


def test_strangers_that_come_again_at_once_displace_each_other_and_no_client() -> None:
    """Each of them has its request being answered as soon as its head has come."""
    table, number = ConnectionTable(16, lambda: 0.0), 0
    clients = begin(table, "a", ConnectionPhase.ANSWERING, 4) + begin(table, "a", ConnectionPhase.SENDING, 4)
    for number in range(400):
        assert table.add_connection(stranger := Connection())
        table.set_phase(stranger, ConnectionPhase.SENDING)
        assert table.begin_request(stranger, None, True)
        table.set_phase(stranger, ConnectionPhase.ANSWERING)
        if number % 2:
            table.note_progress(stranger)
        if number == 200:
            # Its head is on its way.
            assert table.add_connection(new := Connection())
            clients.append(new)
    assert number == 399 and not any(one.evicted for one in clients)


def test_a_tenant_alone_takes_half_of_the_table_and_there_is_room_for_another() -> None:
    table, answering = ConnectionTable(8), ConnectionPhase.ANSWERING

    def count_begun(tenant: str, has_others: bool = True) -> int:
        begun = 0
        for _ in range(8):
            if not table.add_connection(connection := Connection()):
                break
            table.set_phase(connection, answering)
            if not table.begin_request(connection, tenant, has_others):
                table.remove_connection(connection)
                break
            begun += 1
        return begun

    assert [count_begun(tenant) for tenant in "abcd"] == [4, 2, 1, 1]
    table = ConnectionTable(8)
    assert count_begun("", has_others=False) == 8


def test_beyond_its_share_a_tenant_loses_its_own_connection_that_waits() -> None:
    table = ConnectionTable(8)
    others = begin(table, "b", ConnectionPhase.BLOCKED)
    own = begin(table, "a", ConnectionPhase.BLOCKED, 3) + begin(table, "a", ConnectionPhase.SENDING)
    for expected in own:
        assert table.add_connection(new := Connection())
        table.set_phase(new, ConnectionPhase.ANSWERING)
        assert table.begin_request(new, "a", True)
        assert expected.evicted
    assert table.add_connection(new := Connection())
    table.set_phase(new, ConnectionPhase.ANSWERING)
    assert not table.begin_request(new, "a", True)
    assert not others[0].evicted and not new.evicted
    # It counts for nobody, as long as its refusal is written.
    table.set_phase(new, ConnectionPhase.BLOCKED)
    assert table.begin_request(others[0], "b", True)


def test_an_idle_connection_has_no_tenant_and_counts_for_none() -> None:
    table = ConnectionTable(4)
    for connection in begin(table, "a", ConnectionPhase.ANSWERING, 2):
        table.set_phase(connection, ConnectionPhase.IDLE)
    assert table.add_connection(new := Connection())
    table.set_phase(new, ConnectionPhase.ANSWERING)
    assert table.begin_request(new, "a", True)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=80))
def test_the_table_and_its_counts_agree_whatever_happens(steps: list[tuple[int, int]]) -> None:
    """The same operations on a plain list of connections give the same number of open requests of each tenant."""
    table, connections = ConnectionTable(5), [Connection() for _ in range(7)]
    phases: dict[Connection, ConnectionPhase] = {}
    tenants: dict[Connection, str] = {}
    for number, step in steps:
        connection = connections[number]
        if step < 2:
            if connection not in phases and table.add_connection(connection):
                phases[connection], connection.evicted = ConnectionPhase.IDLE, False
        elif step < 6:
            phase = list(ConnectionPhase)[step - 2]
            table.set_phase(connection, phase)
            phases.update({connection: phase} if connection in phases else {})
        elif step < 8 and phases.get(connection, ConnectionPhase.IDLE) is not ConnectionPhase.IDLE:
            if table.begin_request(connection, "ab"[step - 6], True):
                tenants[connection] = "ab"[step - 6]
            else:
                tenants.pop(connection, None)
        elif step == 8:
            table.note_progress(connection)
        elif step == 9:
            table.remove_connection(connection)
            phases.pop(connection, None)
        for one in [one for one in phases if one.evicted]:
            del phases[one]
        tenants = {
            one: tenant
            for one, tenant in tenants.items()
            if phases.get(one, ConnectionPhase.IDLE) is not ConnectionPhase.IDLE
        }
        assert len(table) == len(phases) <= 5
        assert table.num_open == len(tenants)
        assert table.open_by_tenant == Counter(tenants.values())


def test_answers_to_a_key_make_no_room() -> None:
    table = ConnectionTable(2)
    connections = begin(table, "a", ConnectionPhase.ANSWERING, 2)
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


def test_whoever_has_most_to_read_loses_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_table, "MAX_UNSENT_BYTES", 100)
    table = ConnectionTable(16)
    b, a = begin(table, "b", ConnectionPhase.BLOCKED), begin(table, "a", ConnectionPhase.BLOCKED, 3)
    assert table.add_connection(stranger := Connection())
    table.set_phase(stranger, ConnectionPhase.BLOCKED)
    table.set_unsent(stranger, 20)
    for connection in (b[0], a[0], a[1]):
        table.set_unsent(connection, 30)
    assert [one.evicted for one in (stranger, *a, *b)] == [True, False, False, False, False]
    table.set_unsent(a[2], 30)
    assert [one.evicted for one in (*a, *b)] == [True, False, False, False]
    table.set_unsent(a[2], 0)
    assert table.unsent_by_tenant == {"a": 30, "b": 30}
    # One large answer alone may be written.
    table.remove_connection(a[1])
    table.remove_connection(b[0])
    table.set_unsent(a[2], 1000)
    assert not a[2].evicted
    table.remove_connection(a[2])
    assert not table.unsent_by_tenant
