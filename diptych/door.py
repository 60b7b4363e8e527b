"""Who may connect to the gateway's channel: those that prove the workers' key (ZAP, ZeroMQ RFC 27)."""

from __future__ import annotations

import collections
import threading

import zmq


def admit(
    context: zmq.Context[zmq.Socket[bytes]], key: bytes, refused: collections.Counter[str]
) -> threading.Thread:
    """Let in who has this public key, count the others as "denied". Call it before anything is bound: without a guard
    libzmq admits every key. The thread, which has begun, ends when the context does.
    """
    door = context.socket(zmq.REP)
    door.bind("inproc://zeromq.zap.01")
    guard = threading.Thread(target=_guard, args=(door, key, refused), name="channel-guard", daemon=True)
    guard.start()
    return guard


def _guard(door: zmq.Socket[bytes], key: bytes, refused: collections.Counter[str]) -> None:
    with door:
        while True:
            try:
                version, request, _domain, _address, _identity, mechanism, *proof = door.recv_multipart()
            except zmq.ContextTerminated:
                return
            good = mechanism == b"CURVE" and proof == [key]
            refused["denied"] += not good
            verdict = [b"200", b"OK", b"worker", b""] if good else [b"400", b"unknown key", b"", b""]
            door.send_multipart([version, request, *verdict])
