"""A peer that is not found: whoever waits gives up, and what comes later can still be had."""

from __future__ import annotations

import threading

import pytest

from diptych.errors import TransferError
from kvtransfer.cooperative import run_to_end
from kvtransfer.transports.connecting import PeerConnector

LONG_S = 60.0


def test_who_waits_gives_up_and_finds_it_later() -> None:
    back = threading.Event()
    joining = PeerConnector(lambda: "agent", lambda made: (made, back.wait(LONG_S)))
    with pytest.raises(TransferError, match="stands still"):
        run_to_end(joining.wait_task(0.0))
    assert not joining.is_done
    back.set()
    assert run_to_end(joining.wait_task(LONG_S)) == "agent"
    assert joining.peer == ("agent", True)


def test_errors_reach_all_who_wait() -> None:
    def refuse(made: str) -> None:
        raise OSError(made)

    joining = PeerConnector(lambda: "agent", refuse)
    for _ in range(2):
        with pytest.raises(OSError, match="agent"):
            run_to_end(joining.wait_task(LONG_S))
