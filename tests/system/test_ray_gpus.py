"""Ray on this machine is told of four GPUs that are not there: which of them each worker is given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Ray reads the environment when it is imported, and is imported once in a process. The folder's path must be short.
PROGRAM = """
import asyncio, json, os, sys, tempfile
from pathlib import Path
from services.host.child_environment import prepare_ray_environment
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
prepare_ray_environment(os.environ)
from diptych.specs import WorkerSpec
from diptych.channel.keys import make_keys
from services.cluster.local_ray.ray_head import LocalRay
from services.cluster.spec import Bundle

async def started(worker):
    while (status := await worker.next_status()) is None or status.state != "ready":
        pass

def seen(local_ray, folder, name, amount):
    spec = WorkerSpec(worker=name, role="decode", gateway="tcp://a:1", keys_dir=str(folder / "keys"), model="m")
    local_ray.groups.reserve_bundle(Bundle(name, 1, (("CPU", 1.0), ("GPU", amount))))
    return local_ray.launch_worker(spec, folder / f"{name}.log", "tests.system.device_child")

async def main(folder):
    local_ray = LocalRay(folder / "ray", 8, 4)
    local_ray.start()
    found = {}
    for share in json.loads(sys.argv[1]):
        names = [f"decode-{share}-{i}".replace(".", "_") for i in range(round(4 / share))]
        workers = [seen(local_ray, folder, name, share) for name in names]
        for worker in workers:
            await asyncio.wait_for(started(worker), 120)
        found[share] = [(folder / f"{worker.name}.log").read_text() for worker in workers]
        for worker in workers:
            await worker.stop(1.0)
            local_ray.groups.release_bundle(worker.name)
    print(json.dumps(found))
    local_ray.stop()

with tempfile.TemporaryDirectory(prefix="dr-", dir="/tmp") as name:
    make_keys(str(Path(name) / "keys"))
    asyncio.run(main(Path(name)))
"""


def devices_of(log: str) -> str:
    (line,) = [line for line in log.splitlines() if line.startswith("devices=")]
    return line.removeprefix("devices=")


def test_four_workers_get_a_gpu_each_and_eight_share_them_in_halves() -> None:
    command = [sys.executable, "-c", PROGRAM, "[1.0, 0.5]"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = json.loads(done.stdout.strip().splitlines()[-1])
    whole, halves = [sorted(map(devices_of, logs[share])) for share in ("1.0", "0.5")]
    assert whole == ["0", "1", "2", "3"]
    assert halves == ["0", "0", "1", "1", "2", "2", "3", "3"]
