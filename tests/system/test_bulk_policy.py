"""The policy of bulk workers: chosen for measured rates, reported by `/status`, and 4 bits reported by each line."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from typer.testing import CliRunner

from diptych.config.load import load_config
from diptych.config.options import Config
from diptych.errors import ConfigError, ModelError
from diptych.specs import BulkPlan
from engine.cpu.offload.loading import measure_model, prepare_weights
from engine.cpu.offload.weight_stream import open_index
from engine.model.checkpoint import Checkpoint
from engine.offload.policy import BlockPolicy, default_policy, parse_policy
from engine.offload.sizes import fit_policy, predict_needs, trim_policy
from planner.costs.model import dims_on_cpu, find_model
from planner.costs.profile import analytic_profile
from planner.costs.profile_file import save_profile
from planner.types import BulkRates, LayerTime
from services.cli.client.status import format_bulk_plan
from services.cli.main import app
from services.cli.serve.offload_plan import plan_bulk
from services.cli.serve.specs import deployment_spec
from services.host.model_probe import ProbedModel, resolve_embedded
from services.host.ports import claim_port
from tests.support.deployment import serve_parts
from tests.system.batches.batch_lines import COMPLETION, finished, input_file, results, start

MIB = 1 << 20
BULK = ("--bulk", "1", "--prefill", "0", "--decode", "0")
TINY = find_model(resolve_embedded("tiny"))
RATES = BulkRates(
    threads=1,
    layer_weights=7.9e5,
    exact=LayerTime(1.5e-4, 1.5e-5, 1.5e-4, 2e-5),
    attention=2e10,
    prompt_attention=2e10,
    end_row_s=2e-5,
    copy=9e9,
    disk_read=8e8,
    disk_write=8e8,
    int4=LayerTime(1.6e-4, 4e-5, 1.6e-4, 3e-5),
    coded_attention=8e8,
)


def save_rates(file: Path, rates: BulkRates | None = RATES) -> Path:
    """A profile of the embedded model with these rates."""
    save_profile(replace(analytic_profile(dims_on_cpu(TINY), "cpu"), bulk=rates), file)
    return file


def plan(
    file: Path | None,
    policy: str | None = None,
    memory: int = 64 * MIB,
    bulk: int = 1,
    folder: str = resolve_embedded("tiny"),
) -> tuple[BulkPlan, BlockPolicy]:
    """The plan for the model in a folder with a context of 1024 tokens, and its policy."""
    given = {"bulk": bulk, "prefill": 0, "decode": 0, "bulk_policy": policy, "data_dir": Path("d")}
    config: Config = load_config("serve", given | {"bulk_profile": file}, {}).config
    model = ProbedModel(folder, "", True, 1024, 0)
    found = plan_bulk(config, model, memory, 1 << 34)
    return found, parse_policy(found.policy, default_policy(1024))


def test_only_a_calibration_needs_the_weights(tmp_path: Path) -> None:
    """On the machine that drives bulk workers in a Ray cluster there are none."""
    bare = str(tmp_path / "bare")
    shutil.copytree(resolve_embedded("tiny"), bare, ignore=shutil.ignore_patterns("*.safetensors"))
    found, policy = plan(save_rates(tmp_path / "p.json"), "kv_codec=int4,weight_kind=int4", folder=bare)
    assert found.source == "profile" and policy.kv_codec == "int4"
    with pytest.raises(ModelError, match="has no weights"):
        plan(None, "kv_codec=nuq4", folder=bare)


def test_the_policy_is_that_of_the_programme_for_the_caps(tmp_path: Path) -> None:
    file = save_rates(tmp_path / "p.json")
    wide, policy = plan(file, memory=512 * MIB)
    assert wide.source == "profile" and wide.profile == str(file)
    assert policy.weights_in_memory == 1 and wide.waits_for == "compute"
    narrow, small = plan(file, memory=24 * MIB)
    assert small.rows < policy.rows and narrow.memory_bytes is not None
    assert narrow.memory_bytes <= 24 * MIB
    coded, _ = plan(file, "weight_kind=int4,kv_codec=int4,prompt_tokens=64,output_tokens=64", 24 * MIB)
    assert coded.memory_bytes is not None and coded.memory_bytes <= 24 * MIB
    assert narrow.tokens_per_s is not None and wide.tokens_per_s is not None
    assert narrow.tokens_per_s < wide.tokens_per_s
    assert (policy.weight_kind, policy.kv_codec) == ("exact", ""), "4 bits are used only if asked for"
    # A batch has room for the longest sequence.
    assert min(policy.rows, small.rows) * 640 >= 1024


def test_workers_of_a_machine_share_its_disk(tmp_path: Path) -> None:
    file = save_rates(tmp_path / "p.json", replace(RATES, disk_read=1e7, disk_write=1e7))
    one, two = (plan(file, memory=20 * MIB, bulk=bulk)[0] for bulk in (1, 2))
    assert one.waits_for == two.waits_for == "disk"
    assert one.tokens_per_s is not None and two.tokens_per_s is not None
    assert two.tokens_per_s < 0.7 * one.tokens_per_s


def test_workers_without_a_profile_share_memory_and_disk(tmp_path: Path) -> None:
    """Also what they may take of the disk is decided once, before they start."""
    given = {"bulk": 2, "prefill": 0, "decode": 0, "data_dir": tmp_path / "d"}
    loaded = load_config("serve", given, {})
    model = ProbedModel(resolve_embedded("tiny"), "", True, 1024, 0)
    channel, port = claim_port("127.0.0.1", 0), claim_port("127.0.0.1", 0)
    workers = deployment_spec(loaded, model, tmp_path, tmp_path, channel, port, ()).workers
    assert len(workers) == 2
    disk, memory = workers[0].bulk_disk_bytes, workers[0].bulk_memory_bytes
    assert (workers[1].bulk_disk_bytes, workers[1].bulk_memory_bytes) == (disk, memory)
    assert disk is not None and 0 < 2 * disk < shutil.disk_usage(tmp_path).total
    assert memory is not None and 0 < 2 * memory < psutil.virtual_memory().total


@pytest.mark.parametrize("kind", ["exact", "int4"])
def test_prepared_weights_count_once_against_the_disk(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are on the disk after the first start, and each start needs them there."""
    free = 1 << 30
    monkeypatch.setattr("diptych.kernels.cache.machine_kernel_folder", lambda: tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=4 << 30, free=free))
    given = {"bulk": 2, "prefill": 0, "decode": 0, "data_dir": tmp_path / "d"}
    loaded = load_config("serve", given | {"bulk_policy": f"weight_kind={kind}"}, {})
    model = ProbedModel(resolve_embedded("tiny"), "", True, 1024, 0)

    def bound() -> int | None:
        return deployment_spec(loaded, model, tmp_path, tmp_path, 1, 2, ()).workers[0].bulk_disk_bytes

    first = bound()
    made = prepare_weights(Checkpoint.resolve(model.path), kind, tmp_path)
    free -= made.stat().st_blocks * 512
    assert bound() == first == (1 << 30) // 4
    # So is a file that another worker is making, or that a killed one has left.
    half = made.with_name(f"{made.stem}.0123.fresh")
    made.rename(half)
    assert bound() == first
    half.rename(made)
    # Those of another kind are in the way, until they are needed.
    other = prepare_weights(Checkpoint.resolve(model.path), "int4" if kind == "exact" else "exact", tmp_path)
    free -= other.stat().st_blocks * 512
    assert bound() == (1 << 30) // 4 - other.stat().st_blocks * 512 // 4


def test_what_is_asked_for_is_kept(tmp_path: Path) -> None:
    file = save_rates(tmp_path / "p.json")
    found, policy = plan(file, "weight_kind=int4,kv_codec=int4,prompt_tokens=100,overlap=off")
    assert found.source == "profile"
    assert (policy.weight_kind, policy.kv_codec, policy.prompt_tokens) == ("int4", "int4", 100)
    assert not policy.overlap and found.waits_for == "disk and compute"
    found, policy = plan(file, "rows=3,batches=2,weights_in_memory=0")
    assert found.source == "setting" and (policy.rows, policy.batches) == (3, 2)
    assert found.tokens_per_s is not None and policy.weights_in_memory == 0
    found, _ = plan(None, "rows=3")
    assert found.source == "setting" and found.tokens_per_s is None
    assert plan(None)[0] == BulkPlan("fit")


def test_profiles_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = save_rates(tmp_path / "p.json")
    none = save_rates(tmp_path / "none.json", None)
    threads = save_rates(tmp_path / "threads.json", replace(RATES, threads=4))
    bare = save_rates(tmp_path / "bare.json", replace(RATES, int4=None, coded_attention=None))
    other = tmp_path / "other.json"
    save_profile(replace(analytic_profile(find_model("Llama-3.1-8B"), "cpu"), bulk=RATES), other)
    for file, policy, text in (
        (none, None, "does not say what bulk work costs"),
        (threads, None, "not of workers like these"),
        (bare, "weight_kind=int4", "does not say what weights of kind int4 cost"),
        (bare, "kv_codec=int4", "does not say what KV in int4 cost"),
        (good, "kv_codec=tq4", "does not say what KV in tq4 cost"),
        (other, None, "is of Llama-3.1-8B"),
        (tmp_path / "missing.json", None, "missing.json"),
    ):
        with pytest.raises(ConfigError) as caught:
            plan(file, policy)
        assert text in caught.value.what, caught.value.what
        assert 1 < len(caught.value.lines()) <= 6


def test_a_profile_refuses_nothing_that_would_be_served_without_one(tmp_path: Path) -> None:
    """The programme counts a little more memory than the engine, and must not refuse what is between the two."""
    file = save_rates(tmp_path / "p.json")
    model = Checkpoint.resolve(resolve_embedded("tiny"))
    index = open_index(prepare_weights(model, "exact", tmp_path))
    sizes = measure_model(model, model.layout(), index, default_policy(1024), 1024)
    for cap in (18 * MIB, 20 * MIB, 24 * MIB):
        found, policy = plan(file, memory=cap)
        assert found.source == "profile" and found.memory_bytes is not None and found.memory_bytes <= cap
        assert trim_policy(lambda _: sizes, policy, cap, 1 << 34, 1024).sequences == policy.sequences
    smallest = "rows=2,weights_in_memory=0,kv_in_memory=0,hidden_in_memory=0,overlap=off"
    tight = predict_needs(sizes, parse_policy(smallest, default_policy(1024)))
    found, _ = plan(file, memory=tight.memory_bytes)
    assert fit_policy(lambda _: sizes, default_policy(1024), tight.memory_bytes, 1 << 34, 1024).rows == 2
    assert (found.source, found.policy, found.profile) == ("fit", "", str(file))
    shown = "\n".join(format_bulk_plan(msgspec.structs.asdict(found) | {"in_force": {}}))
    assert "the largest block that fits; with the rates in" in shown and "none is predicted" in shown
    with pytest.raises(ConfigError, match="bulk work does not fit") as caught:
        fit_policy(lambda _: sizes, default_policy(1024), 12 * MIB, 1 << 34, 1024)
    assert caught.value.fix == "use --bulk-memory-bytes 17MiB, or another --bulk-policy"
    assert len(caught.value.lines()) <= 6


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("rows=none", "rows must be a whole number"),
        ("weights_in_memory=0.5", "weights_in_memory has no effect without rows and batches"),
        ("colour=red", "'colour=red' is not one of rows, "),
    ],
)
def test_a_wrong_policy_is_refused_before_anything_starts(
    policy: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("services.cli.serve.commands.run_guarded_with_folder", pytest.fail)
    done = CliRunner().invoke(app, ["serve", *BULK, "--data-dir", "d", "--bulk-policy", policy])
    assert isinstance(done.exception, ConfigError), done.output
    assert done.exception.what == "the policy of bulk work is wrong" and why in done.exception.why


def test_status_tells_the_plan_and_lines_tell_4_bits(tmp_path: Path) -> None:
    profile = save_rates(tmp_path / "p.json")
    kinds = ("--bulk-policy", "weight_kind=int4,kv_codec=int4,prompt_tokens=64,output_tokens=64")
    caps = ("--bulk-memory-bytes", "24MiB", "--max-model-len", "128", "--bulk-profile", str(profile))
    body = {"model": "tiny", "prompt": "def f(x):", "max_tokens": 4, "temperature": 0}
    with serve_parts(*BULK, "--data-dir", str(tmp_path / "data"), *caps, *kinds) as served:
        reported = served.status()["bulk_plan"]
        fingerprint = served.status()["workers"][0]["fingerprint"]
        with served.client() as client:
            batch = start(client, input_file([("a", body)], COMPLETION), COMPLETION)
            line = results(client, finished(client, batch.id).output_file_id)["a"]["response"]["body"]
    assert (
        reported["source"] == "profile"
        and reported["tokens_per_s"] > 0
        and reported["waits_for"] == "compute"
    )
    planned = parse_policy(reported["policy"], default_policy(128))
    running = parse_policy(reported["in_force"]["decode-0"], default_policy(128))
    assert running.sequences == planned.sequences >= 32
    assert (running.weight_kind, running.kv_codec) == ("int4", "int4")
    shown = "\n".join(format_bulk_plan(reported))
    assert (
        str(profile) in shown and reported["in_force"]["decode-0"] in shown and "waits for: compute" in shown
    )
    kv_class = line["usage"]["diptych"]["kv_class"]
    assert kv_class.startswith("int4")
    assert line["system_fingerprint"] == f"fp_{fingerprint[:12]}.weights-int4.{kv_class}"
