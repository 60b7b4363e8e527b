"""Which driver has a namespace. Ray's store and its jobs are made up."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import ray

from diptych.errors import StartError
from services.cluster import join as under_test
from services.cluster.join import NamespaceClaim


class Namespace:
    """The entries in Ray's store, and its jobs, of which each thread has one. Counts how often a driver waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries, self.waited = dict[str, bytes](), 0
        self.jobs, self.dead = threading.local(), set[str]()
        self.jobs.own = "02"
        context = SimpleNamespace(get_job_id=lambda: self.jobs.own)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        known = ("00", "01", "02", "03")
        monkeypatch.setattr(
            under_test,
            "cluster_state",
            SimpleNamespace(job_table=lambda: [{"JobID": job, "IsDead": job in self.dead} for job in known]),
        )
        store = SimpleNamespace(
            _internal_kv_get=self.entries.get,
            _internal_kv_put=self.put,
            _internal_kv_del=lambda key: self.entries.pop(key, None),
            _internal_kv_list=lambda prefix: [key.encode() for key in self.entries if key.startswith(prefix)],
        )
        monkeypatch.setattr(under_test, "internal_kv", store)
        monkeypatch.setattr(under_test, "DRIVER_END_S", 0.05)
        monkeypatch.setattr(under_test, "PAUSE_S", (0.01, 0.02))
        self.leaves = threading.Event()
        wait = self.leaves.wait

        def count(seconds: float) -> bool:
            self.waited += 1
            return wait(seconds)

        monkeypatch.setattr(self.leaves, "wait", count)

    def put(self, key: str, entry: bytes, overwrite: bool) -> None:
        self.entries[key] = entry

    def set_driver(self, job: str = "01", name: str = "n", **changed: Any) -> str:
        """This process drives it as this job, but for what is `changed`; the entry's key."""
        own, key = psutil.Process(), f"diptych:driver:{name}:{job}"
        entry = {"pid": own.pid, "host": socket.gethostname(), "began_s": own.create_time()}
        self.entries[key] = msgspec.json.encode(entry | changed)
        return key


@pytest.mark.parametrize(
    ("changed", "waits"),
    [({}, False), ({"began_s": 1.0}, True), ({"pid": 1 << 30}, True), ({"host": "elsewhere"}, True)],
)
def test_a_living_driver_of_this_machine_is_not_waited_for(
    changed: dict[str, Any], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = Namespace(monkeypatch)
    before = {namespace.set_driver(**changed)}
    with pytest.raises(StartError, match="a deployment named n runs in this Ray cluster") as caught:
        NamespaceClaim("n").take_namespace(namespace.leaves)
    assert (namespace.waited > 0) is waits and "--ray-namespace" in caught.value.fix
    assert namespace.entries.keys() == before


def test_the_namespace_of_dead_drivers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace, claim = Namespace(monkeypatch), NamespaceClaim("n")
    namespace.dead = {"00", "01"}
    for job in ("00", "01", "a job that Ray does not know"):
        namespace.set_driver(job)
    # Those of other namespaces do not matter.
    others = {namespace.set_driver("03", "n2"), namespace.set_driver("03", "m")}
    claim.take_namespace(namespace.leaves)
    assert namespace.entries.keys() - others == {"diptych:driver:n:02"} and namespace.waited == 0
    assert claim.is_held
    claim.release()
    assert namespace.entries.keys() == others and not claim.is_held


def test_of_two_drivers_at_the_same_moment_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have seen that there is none, before either has made its entry."""
    namespace = Namespace(monkeypatch)
    both, met = threading.Barrier(2), threading.local()
    store: Any = vars(under_test)["internal_kv"]
    put = store._internal_kv_put

    def put_together(*entry: Any, **options: Any) -> None:
        if not hasattr(met, "once"):
            met.once = True
            both.wait(10.0)
        put(*entry, **options)

    monkeypatch.setattr(store, "_internal_kv_put", put_together)
    driving, refused = list[str](), list[str]()

    def drive(job: str) -> None:
        namespace.jobs.own = job
        try:
            NamespaceClaim("n").take_namespace(threading.Event())
            driving.append(job)
        except StartError as error:
            refused.append(error.what)

    threads = [threading.Thread(target=drive, args=(job,)) for job in ("02", "03")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(driving) <= 1 and len(driving) + len(refused) == 2
    assert list(namespace.entries) == [f"diptych:driver:n:{job}" for job in driving]


def test_a_driver_that_waits_for_another_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = Namespace(monkeypatch)
    monkeypatch.setattr(under_test, "DRIVER_END_S", 3600.0)
    namespace.set_driver(host="elsewhere")
    namespace.leaves.set()
    with pytest.raises(StartError, match="the deployment stops"):
        NamespaceClaim("n").take_namespace(namespace.leaves)
