"""`python -m decode_worker`: a process that writes answers. Started by a supervisor; see `worker.start`."""

from __future__ import annotations

import sys

from worker.start import Voice, prepare, supervised

if __name__ == "__main__":
    prepare()

from decode_worker.courier import Courier
from decode_worker.worker import Decoder
from diptych.config import WorkerSpec
from diptych.keys import load_transfer_key
from kvtransfer.links import Links
from worker import build
from worker.shell import Books, Shell, live


def main(spec: WorkerSpec, voice: Voice) -> None:
    """Build a decode worker and run it until it is drained."""
    key = load_transfer_key(spec.keys_dir)
    found = build.find(spec)
    engine, pool = build.make_engine(spec, found, None, voice)
    books = Books()
    hello = build.introduce(spec, found, {})
    link = build.connect(spec, hello, books)
    links = Links(spec.transports, pool.memory, pool.layout.chunk_bytes, spec.digest)
    courier = Courier(links, link.send, link.wake)
    role = Decoder(link, engine, pool, courier, key, hello.fingerprint)
    courier.open()
    try:
        live(Shell(link, engine, role, pool, books), link, spec, voice)
    finally:
        courier.close()


if __name__ == "__main__":
    sys.exit(supervised(main))
