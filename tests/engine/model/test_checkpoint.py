"""Model folders: what is refused and how that is explained, memory arithmetic, fingerprints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import ModelError
from engine.model import checkpoint as files_module
from engine.model import hub
from engine.model.architecture import SUPPORTED
from engine.model.checkpoint import Checkpoint
from engine.model.memory_plan import (
    USABLE_SHARE,
    available_memory,
    format_bytes,
    plan_memory,
    sink_table_slots,
)
from engine.model.weights import WeightReader
from kvtransfer.ticket import StagingHint, Ticket
from tests.support.factories import make_folder, make_oracle, save_model

GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("files"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def change(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def refused(path: str | Path) -> ModelError:
    """The refusal, which must be complete and fit on six lines."""
    with pytest.raises(ModelError) as caught:
        Checkpoint.resolve(str(path))
    error = caught.value
    lines = error.lines()
    assert len(lines) <= 6 and error.what and len(f"{error.what}{error.why}{error.fix}") < 1000
    assert 1 + len(error.why.splitlines()) + len(error.fix.splitlines()) <= 6  # nothing is cut off
    return error


def test_a_complete_folder(folder: Path) -> None:
    found = Checkpoint.resolve(str(folder))
    assert found.path == folder and found.config.layers == 2 and found.config.head_dim == 12
    assert found.layout().chunk_shape == (2, 2, 2, 64, 12)
    assert set(found.weights.values()) == {folder / "model.safetensors"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "config.json").unlink(), "no config.json"),
        (lambda p: (p / "config.json").write_text("{"), "cannot be read"),
        (lambda p: (p / "config.json").write_text("[]"), "not a JSON object"),
        (lambda p: (p / "model.safetensors").unlink(), "no weights"),
        (lambda p: (p / "model.safetensors").write_bytes(b"not safetensors"), "cannot be read"),
        (lambda p: (p / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda p: change(p, hidden_act="gelu"), "not supported"),
        (
            lambda p: change(p, rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}),
            "not supported",
        ),
        (lambda p: change(p, num_attention_heads=[]), "not valid"),
    ],
)
def test_incomplete_folders_are_refused(copy: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(copy)
    assert message in refused(copy).what


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None])
def test_unsupported_architectures_list_the_supported(copy: Path, architectures: list[str] | None) -> None:
    change(copy, architectures=architectures)
    error = refused(copy)
    assert all(name in error.fix for name in SUPPORTED)


def test_quantised_checkpoints_are_refused(copy: Path) -> None:
    change(copy, quantization_config={"quant_method": "awq", "bits": 4})
    assert "awq" in refused(copy).why


def test_remote_code_never_runs(copy: Path) -> None:
    change(copy, model_type="unheard-of", auto_map={"AutoConfig": "evil.Config"})
    (copy / "evil.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\nclass Config: pass\n")
    refused(copy)
    assert not (copy / "ran").exists()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, make_oracle(), shard="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refused(tmp_path).why


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere/at/all", "just-a-word", "a/b/c"])
def test_what_is_neither_folder_nor_id_is_refused(name: str) -> None:
    assert name in refused(name).what


def test_an_id_that_cannot_be_fetched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no network\n" * 20)

    monkeypatch.setattr(hub, "snapshot_download", offline)
    assert "owner/name" in refused("owner/name").what


def test_fingerprint_is_of_the_content(copy: Path, folder: Path) -> None:
    first, identity = Checkpoint.resolve(str(folder)).fingerprint()
    second, other = Checkpoint.resolve(str(copy)).fingerprint()
    assert first == second and len(first) == 64
    assert {name for name in identity if identity[name] != other[name]} == {"model"}
    assert identity["kv_layout"] == "2x2x2x64x12" and identity["dtype"] == "float32"
    assert Checkpoint.resolve(str(folder)).fingerprint("float16")[0] != first
    # Workers on other devices round otherwise, and have other fingerprints.
    cuda, shown = Checkpoint.resolve(str(folder)).fingerprint(device_type="cuda")
    assert cuda != first and shown == identity | {"device_type": "cuda"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("whole", [True, False])
def test_fingerprint_sees_a_changed_byte(
    copy: Path, name: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        for constant, value in (("HASH_WHOLE_BYTES", 0), ("NUM_SAMPLES", 4), ("SAMPLE_BYTES", 1024)):
            monkeypatch.setattr(files_module, constant, value)
    model = Checkpoint.resolve(str(copy))
    before = model.fingerprint()[0]
    content = bytearray((copy / name).read_bytes())
    content[-20] ^= 1
    (copy / name).write_bytes(content)
    assert model.fingerprint()[0] != before


def test_fingerprint_sees_another_version_of_tickets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of two versions would be paired otherwise, and refuse each other's tickets."""
    files = Checkpoint.resolve(str(folder))
    before, fields = files.fingerprint()
    defaults = [kind.__struct_defaults__[-1] for kind in (Ticket, StagingHint)]
    assert fields["wire_version"].split(".")[1:] == [str(version) for version in defaults]
    for name in ("KV_VERSION", "TICKET_VERSION", "HINT_VERSION"):
        with monkeypatch.context() as patch:
            patch.setattr(files_module, name, 99)
            assert files.fingerprint()[0] != before


def test_fingerprint_sees_another_model(folder: Path, tmp_path: Path) -> None:
    other = Checkpoint.resolve(str(make_folder(tmp_path, seed=1)))
    mine, yours = Checkpoint.resolve(str(folder)).fingerprint(), other.fingerprint()
    assert mine[0] != yours[0]
    assert {name for name in mine[1] if mine[1][name] != yours[1][name]} == {"model", "weights"}


def test_memory_that_fits(folder: Path) -> None:
    plan = Checkpoint.resolve(str(folder)).memory(max_model_len=None, kv_bytes=None)
    assert plan.max_model_len == 512 and plan.num_slabs == 16 * 8
    assert plan.kv_bytes == plan.num_slabs * 2 * 2 * 2 * 64 * 12 * 4
    assert available_memory() > plan.kv_bytes


@pytest.mark.parametrize(("dtype", "matrix_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_announced_figure_is_what_is_held(dtype: torch.dtype, matrix_bytes: int, tmp_path: Path) -> None:
    """Matrices in 16 bits if they come so, the embedding in float32 on every rank that reads tokens."""
    files = Checkpoint.resolve(str(save_model(tmp_path, make_oracle(), dtype)))
    embedding = 300 * 48
    for tp in (1, 2):
        plan = files.memory(max_model_len=None, kv_bytes=None, tp=tp)
        matrices = files.config.parameters - embedding
        assert plan.weight_bytes == matrices * matrix_bytes + tp * embedding * 4
        assert plan.total_bytes == plan.weight_bytes + plan.kv_bytes + plan.step_bytes
    narrow = files.memory(max_model_len=None, kv_bytes=None, step_tokens=64)
    assert narrow.step_bytes < plan.step_bytes


def test_first_tokens_beside_a_coded_pool_are_planned_with(folder: Path) -> None:
    """64 MiB over all ranks, but a slot for every sequence of a step, and no more slots than there are ids."""
    model = Checkpoint.resolve(str(folder))
    one = 2 * 2 * 2 * 12 * 4  # layers, K and V, heads, width, bytes
    raw, coded = (model.memory(max_model_len=None, kv_bytes=None, codec=codec) for codec in ("", "fp16"))
    assert (raw.sink_slots, raw.sink_bytes) == (0, 0)
    assert (coded.sink_slots, coded.sink_bytes) == (model.config.vocab, model.config.vocab * one)
    assert (raw.angle_bytes, coded.angle_bytes) == (0, 512 * 12 * 4), "a cosine and a sine of six pairs"
    beside = coded.sink_bytes + coded.angle_bytes
    assert coded.total_bytes == coded.weight_bytes + coded.kv_bytes + beside + coded.step_bytes
    spread = model.memory(max_model_len=100, kv_bytes=None, codec="fp16", tp=2, ranks=4)
    assert spread.angle_bytes == 4 * 128 * 12 * 4, "each rank has them, for whole chunks"
    large = replace(model.config, vocab=1 << 30)
    assert sink_table_slots(large, model.layout(codec="fp16"), 64) == (64 << 20) // one
    wide = replace(model.layout(codec="fp16"), layers=80, kv_heads=8, head_dim=128)
    assert sink_table_slots(large, wide, 64) == (64 << 20) // (80 * 2 * 8 * 128 * 4) == 102
    assert sink_table_slots(large, wide, 512) == 512


def test_a_coded_pool_is_refused_with_its_first_tokens_in_the_arithmetic(folder: Path) -> None:
    model = Checkpoint.resolve(str(folder))
    plan = model.memory(max_model_len=None, kv_bytes=1 << 20, codec="fp16")
    enough = int((plan.fixed_bytes + plan.kv_bytes) / USABLE_SHARE) + 1
    sized: dict[str, Any] = {"max_model_len": None, "kv_bytes": plan.kv_bytes, "codec": "fp16"}
    assert model.memory(**sized, available_bytes=enough).kv_bytes == plan.kv_bytes
    with pytest.raises(ModelError) as caught:
        model.memory(**sized, available_bytes=enough - 1024)
    tables = (
        f"+ first tokens {format_bytes(plan.sink_bytes)} + angles {format_bytes(plan.angle_bytes)} + KV pool"
    )
    assert tables in caught.value.why
    assert len(caught.value.lines()) == 5 and caught.value.fix.startswith("lower the KV pool to ")


def test_parts_of_a_tensor_are_read_like_the_whole(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    with WeightReader(Checkpoint.resolve(str(folder)).weights) as weights:
        whole = weights.read_tensor(name, 48, 80)
        assert torch.equal(weights.read_tensor(name, 48, 80, rows=slice(5, 9)), whole[5:9])
        assert torch.equal(weights.read_tensor(name, 48, 80, columns=slice(27, 54)), whole[:, 27:54])
        some = weights.read_stacked([(name, 48, slice(0, 3)), (name, 48, slice(40, 48))], 80)
        assert torch.equal(some, torch.cat([whole[:3], whole[40:]]))
        with pytest.raises(ModelError, match="has the shape"):
            weights.read_tensor(name, 80, 48, rows=slice(0, 1))


@pytest.mark.parametrize(
    ("kv_bytes", "available", "fix"),
    [
        (100_000, 4 << 20, "raise the KV pool to at least 192.00 KiB, or use --max-model-len 256 or less"),
        (None, 380_000, "use --max-model-len 192 or less"),
        (3 << 20, 3 << 20, "lower the KV pool to 2.45 MiB or less"),
        (3 << 20, 30_000, "use a smaller model, or a machine with more memory"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic(
    folder: Path, kv_bytes: int | None, available: int, fix: str
) -> None:
    with pytest.raises(ModelError) as caught:
        Checkpoint.resolve(str(folder)).memory(
            max_model_len=None, kv_bytes=kv_bytes, available_bytes=available
        )
    error = caught.value
    assert error.fix == fix and len(error.lines()) == 5
    assert "weights 256.50 KiB + KV pool" in error.why
    assert "8 chunks x 24.00 KiB = 192.00 KiB" in error.why


@pytest.mark.parametrize("length", [0, 513])
def test_lengths_beyond_the_model_are_refused(folder: Path, length: int) -> None:
    with pytest.raises(ModelError) as caught:
        Checkpoint.resolve(str(folder)).memory(max_model_len=length, kv_bytes=None)
    assert "1 to 512" in caught.value.why and "512" in caught.value.fix


@given(
    available=st.integers(0, 1 << 20),
    length=st.one_of(st.none(), st.integers(1, 512)),
    kv_bytes=st.one_of(st.none(), st.integers(0, 1 << 19)),
)
def test_memory_plans_fit_or_name_a_context_that_does(
    folder: Path, available: int, length: int | None, kv_bytes: int | None
) -> None:
    model = Checkpoint.resolve(str(folder))

    def plan(length: int | None) -> int:
        found = plan_memory(
            "m", model.config, model.layout(), max_model_len=length, kv_bytes=kv_bytes, available=available
        )
        assert found.weight_bytes + found.kv_bytes <= available * USABLE_SHARE
        assert found.num_slabs >= model.layout().num_chunks(found.max_model_len)
        return found.max_model_len

    try:
        assert plan(length) == (length or 512)
    except ModelError as error:
        assert len(error.lines()) == 5 and "weights" in error.why
        longest = int(error.why.split("fits is ")[1].split(" ")[0])
        assert longest < (length or 512) or "lower the KV pool" in error.fix
        if longest and "lower the KV pool" not in error.fix:
            assert plan(longest) == longest
            if longest < 512:
                with pytest.raises(ModelError):
                    plan(longest + 1)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 * GIB // 2, "1.50 GiB")]
)
def test_bytes_are_shown_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text
