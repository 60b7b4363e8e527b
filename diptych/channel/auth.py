"""Authenticates workers on the gateway's channel: only those that prove the workers' key (ZAP, ZeroMQ RFC 27)."""

from __future__ import annotations

import collections
import threading

import zmq


def start_zap_guard(
    context: zmq.Context[zmq.Socket[bytes]], key: bytes, refused: collections.Counter[str]
) -> threading.Thread:
    """Admit only connections with the public key `key`, and count all others in `refused` as "denied".

    Call it before a socket is bound: without this guard libzmq admits every key. Returns the running thread, which ends
    when the context is terminated.
    """
    zap_socket = context.socket(zmq.REP)
    zap_socket.bind("inproc://zeromq.zap.01")
    guard = threading.Thread(
        target=_answer_zap_requests, args=(zap_socket, key, refused), name="channel-guard", daemon=True
    )
    guard.start()
    return guard


def _answer_zap_requests(
    zap_socket: zmq.Socket[bytes], key: bytes, refused: collections.Counter[str]
) -> None:
    """Answer libzmq's authentication requests (frames as in RFC 27) until the context is terminated."""
    with zap_socket:
        while True:
            try:
                version, request, _domain, _address, _identity, mechanism, *proof = (
                    zap_socket.recv_multipart()
                )
            except zmq.ContextTerminated:
                return
            good = mechanism == b"CURVE" and proof == [key]
            refused["denied"] += not good
            reply = [b"200", b"OK", b"worker", b""] if good else [b"400", b"unknown key", b"", b""]
            zap_socket.send_multipart([version, request, *reply])
