"""A peer that is not found: whoever waits gives up, and what comes later can still be had."""

from __future__ import annotations

import threading

import pytest

from diptych.errors import TransferError
from kvtransfer.transports.joining import Joining
from kvtransfer.turns import finish

LONG_S = 60.0


def test_who_waits_gives_up_and_finds_it_later() -> None:
    back = threading.Event()
    joining = Joining(lambda: "agent", lambda made: (made, back.wait(LONG_S)))
    with pytest.raises(TransferError, match="stands still"):
        finish(joining.wait(0.0))
    assert not joining.done
    back.set()
    assert finish(joining.wait(LONG_S)) == "agent"
    assert joining.peer == ("agent", True)


def test_what_went_wrong_is_told_to_all_who_wait() -> None:
    def refuse(made: str) -> None:
        raise OSError(made)

    joining = Joining(lambda: "agent", refuse)
    for _ in range(2):
        with pytest.raises(OSError, match="agent"):
            finish(joining.wait(LONG_S))
