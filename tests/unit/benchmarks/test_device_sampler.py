"""The benchmark that compares the sampler of a device with the host's."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks import device_sampler
from engine.gpu.sampler import DeviceSampler
from engine.protocols import SampledToken
from engine.sampling.sampler import SamplerRow

CPU = torch.device("cpu")
FEW = {2: 80, 50: 160, 1025: 120, 4099: 40}


def test_rows_of_the_grid_do_not_differ() -> None:
    tally = device_sampler.compare(FEW, CPU, 1)
    assert (tally.rows, tally.different, tally.examples) == (400, 0, [])
    assert 20 < tally.hosted < 120 and 10 < tally.undecided < 200 and tally.undecided_ordinary < 20


def test_a_row_that_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DeviceSampler.sample

    def sample_wrongly(
        self: DeviceSampler, logits: list[torch.Tensor], rows: list[SamplerRow]
    ) -> list[SampledToken | Exception]:
        first, *others = right(self, logits, rows)
        return [SampledToken(self.vocab_size) if isinstance(first, SampledToken) else ValueError(), *others]

    monkeypatch.setattr(DeviceSampler, "sample", sample_wrongly)
    tally = device_sampler.compare({50: 3 * device_sampler.BATCH}, CPU, 1)
    assert tally.different == 3 == len(tally.examples)


def test_all_rows_are_twenty_thousand_up_to_the_largest_vocabulary() -> None:
    assert sum(device_sampler.ROWS.values()) == 20_000
    assert min(device_sampler.ROWS) == 2 and max(device_sampler.ROWS) == 128_256


def test_every_parameter_and_every_kind_of_logits_occurs() -> None:
    rng = random.Random(0)
    asked = [device_sampler.make_row(rng, 50).sampling for _ in range(2000)]
    for name, values in device_sampler.PARAMS.items():
        assert {getattr(one, name) for one in asked} >= set(values)
    generator = torch.Generator().manual_seed(0)
    for kind in device_sampler.LOGITS:
        for vocab in (2, 50):
            logits = device_sampler._make_logits(kind, vocab, generator)
            assert logits.shape == (vocab,) and logits.dtype == torch.float32
            assert kind not in device_sampler.VALID or logits.max().isfinite()


def test_speed_is_measured_of_every_kind() -> None:
    found = device_sampler.measure_speed(CPU, 2, 3000, 1)
    assert set(found) == set(device_sampler.SPEED_KINDS)
    assert all(taken["device"] > 0 and taken["host"] > 0 for taken in found.values())
