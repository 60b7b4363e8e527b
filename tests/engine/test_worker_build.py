"""What a worker refuses before it reads any weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.config import WorkerSpec
from diptych.errors import ConfigError, DiptychError, ModelError
from tests.factories import make_folder
from worker.build import find


def spec(folder: Path, **changes: object) -> WorkerSpec:
    fields: dict[str, object] = {
        "worker": "decode-0",
        "role": "decode",
        "gateway": "tcp://127.0.0.1:1",
        "keys_dir": "keys",
        "model": str(folder),
        "kv_bytes": 8 << 20,
    }
    return WorkerSpec(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"device": "cuda"}, ConfigError, "cuda"),
        ({"dtype": "float16"}, ConfigError, "float16"),
        ({"max_num_seqs": 600}, ConfigError, "512 tokens is too small for 600 requests"),
        ({"max_model_len": 100_000}, ModelError, "100000 tokens"),
        ({"kv_bytes": 64 << 10}, ModelError, "does not fit"),
        ({"tp": 4}, ModelError, "cannot be split into 1 stages of 4 ranks"),  # it has 2 KV heads
        ({"pp": 3}, ModelError, "cannot be split into 3 stages of 1 ranks"),  # and 2 layers
        ({"tp": 1024, "pp": 2}, ConfigError, "2048 ranks are too many"),
    ],
)
def test_refusals_name_what_is_wrong(
    folder: Path, changes: dict[str, object], kind: type[DiptychError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        find(spec(folder, **changes))
    assert caught.value.fix and len(caught.value.lines()) <= 6


def test_the_longest_request_and_the_pool_are_what_was_asked_for(folder: Path) -> None:
    found = find(spec(folder))
    assert sum(found.sizes) == found.plan.num_slabs * found.layout.chunk_bytes <= 8 << 20
    assert found.plan.max_model_len == 512
