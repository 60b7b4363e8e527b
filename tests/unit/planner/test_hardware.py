"""Devices: names in any spelling, sane figures, and an unknown one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.errors import ConfigError
from planner.hardware import CPU, DEVICES, Device, find_device, served_device


@pytest.mark.parametrize("one", DEVICES.values(), ids=lambda one: one.name)
def test_figures_are_of_a_real_device(one: Device) -> None:
    assert one.flops > 1e10 and one.bytes_per_s > 1e9 and one.memory_bytes > 1e9 and one.price_per_hour > 0
    gets = one.gets
    assert min(gets.flops, gets.attention, gets.bytes, gets.link) > 0
    assert max(gets.flops, gets.attention, gets.bytes, gets.link) <= 1
    assert one.node.intra.bytes_per_s >= one.node.inter.bytes_per_s
    assert one.rate(2) == one.flops <= one.rate(1)


def test_names_in_any_spelling() -> None:
    assert (
        find_device("h100")
        is find_device("H100")
        is find_device("h100_sxm")
        is find_device("NVIDIA H100 80GB HBM3")
    )
    assert find_device("A100") is find_device("a100-80gb") is find_device("NVIDIA A100-SXM4-80GB")


def test_an_unknown_device_names_those_known() -> None:
    with pytest.raises(ConfigError) as error:
        find_device("TPU-9")
    assert all(one.name in error.value.why for one in DEVICES.values())
    assert len(error.value.lines()) <= 6


def test_a_device_that_a_profile_describes_comes_first() -> None:
    mine = replace(find_device("H100"), name="Mine 80GB", price_per_hour=1.0)
    assert find_device("mine-80g", mine) is mine
    cheaper = replace(find_device("H100"), price_per_hour=1.0)
    assert find_device("h100", cheaper) is cheaper and find_device("H200", cheaper) is DEVICES["h200"]
    with pytest.raises(ConfigError) as error:
        find_device("TPU-9", mine)
    assert mine.name in error.value.why and "--profile" in error.value.fix
    assert "`diptych profile`" not in error.value.fix, (
        "that measures the cores of this machine, and nothing else"
    )


def test_cores_are_of_one_machine() -> None:
    assert find_device("cpu").slots > 256 and find_device("H100").slots == 8


def test_the_device_of_workers_is_the_one_that_they_name() -> None:
    assert served_device(["cpu", "cpu"]).name == served_device(["emulated"]).name == CPU
    assert served_device(["NVIDIA H200"] * 2).name == "H200"
    with pytest.raises(ConfigError, match="workers compute on NVIDIA H200 and cpu"):
        served_device(["NVIDIA H200", "cpu"])
    with pytest.raises(ConfigError, match="is not known"):
        served_device(["NVIDIA Imaginary 9000"])
