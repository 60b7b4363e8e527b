"""`python -m prefill_worker`: a process that reads prompts. Started by a supervisor; see `worker.start`."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing

from worker.start import Voice, prepare, supervised

if __name__ == "__main__":
    prepare()

from diptych.config import WorkerSpec
from diptych.keys import load_transfer_key
from kvtransfer.leases import LeaseLedger
from kvtransfer.links import open_sources
from kvtransfer.memory import SharedMemory
from prefill_worker.worker import Issuer, Prefiller
from worker import build
from worker.shell import Books, Shell, live


def main(spec: WorkerSpec, voice: Voice) -> None:
    """Build a prefill worker, whose pool others may read, and run it until it is drained."""
    key = load_transfer_key(spec.keys_dir)
    found = build.find(spec)
    with ExitStack() as owned:
        memories = [owned.enter_context(closing(SharedMemory(size))) for size in found.sizes]
        sources = open_sources(spec.transports, list(zip(found.shards, memories, strict=True)), spec.worker)
        for source in sources.values():
            owned.callback(source.close)
        body = owned.enter_context(closing(build.make_engine(spec, found, memories, voice)))
        books = Books()
        hello = build.introduce(spec, found, {name: source.endpoint() for name, source in sources.items()})
        link = build.connect(spec, hello, books)
        issuer = Issuer(key, hello.worker, hello.incarnation, hello.fingerprint, spec.digest)
        role = Prefiller(link, body.engine, body.holdings, body.pool, LeaseLedger(spec.lease_s), issuer)
        root = hello.fingerprint if spec.prefix_caching else ""
        shell = Shell(link, body.engine, role, body.holdings, books, fingerprint=root)
        live(shell, link, spec, voice)


if __name__ == "__main__":
    sys.exit(supervised(main))
