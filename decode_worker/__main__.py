"""`python -m decode_worker`: a process that writes answers. Started by a supervisor; see `worker.start`."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing

from worker.start import Voice, prepare, supervised

if __name__ == "__main__":
    prepare()

from decode_worker.courier import Courier
from decode_worker.worker import Decoder
from diptych.config import WorkerSpec
from diptych.keys import load_transfer_key
from kvtransfer.links import Links
from kvtransfer.memory import SharedMemory
from worker import build
from worker.shell import Books, Shell, live


def main(spec: WorkerSpec, voice: Voice) -> None:
    """Build a decode worker and run it until it is drained."""
    key = load_transfer_key(spec.keys_dir)
    found = build.find(spec)
    with ExitStack() as owned:
        # Memory of one rank is its own; other ranks have to be given theirs.
        sizes = found.sizes if len(found.sizes) > 1 else []
        memories = [owned.enter_context(closing(SharedMemory(size))) for size in sizes]
        body = owned.enter_context(closing(build.make_engine(spec, found, memories, voice)))
        books = Books()
        hello = build.introduce(spec, found, {})
        link = build.connect(spec, hello, books)
        links = Links(spec.transports, body.pool, spec.digest)
        courier = Courier(links, link.send, link.wake)
        role = Decoder(link, body.engine, body.holdings, found.layout, courier, key, hello.fingerprint)
        courier.open()
        owned.callback(courier.close)
        root = hello.fingerprint if spec.prefix_caching else ""
        shell = Shell(link, body.engine, role, body.holdings, books, fingerprint=root)
        live(shell, link, spec, voice)


if __name__ == "__main__":
    sys.exit(supervised(main))
