"""`python -m prefill_worker`: a process that reads prompts. Started by a supervisor; see `worker.start`."""

from __future__ import annotations

import sys

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
    memory = SharedMemory(found.plan.kv_bytes)
    sources = open_sources(spec.transports, memory, spec.worker)
    try:
        engine, pool = build.make_engine(spec, found, memory.view, voice)
        books = Books()
        hello = build.introduce(spec, found, {name: source.endpoint() for name, source in sources.items()})
        link = build.connect(spec, hello, books)
        issuer = Issuer(key, hello.worker, hello.incarnation, hello.fingerprint, spec.digest)
        role = Prefiller(link, engine, pool, LeaseLedger(spec.lease_s), issuer)
        live(Shell(link, engine, role, pool, books), link, spec, voice)
    finally:
        for source in sources.values():
            source.close()
        memory.close()


if __name__ == "__main__":
    sys.exit(supervised(main))
