"""Which GPUs measure; the devices are faked."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest

from tuner.cli.sweep import add_machine, machine_of
from tuner.errors import BenchmarkError, ConfigError
from tuner.hardware import GPUS, Gpu
from tuner.measure import device
from tuner.measurement import Environment
from tuner.runners.choose import Machine, Runners
from tuner.runners.gpus import choose, parse_devices

H200, H100 = GPUS["H200"], GPUS["H100"]


class Host:
    """A machine's GPUs, their power limits and who computes on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
        self.gpus = list(gpus)
        self.watts = [700] * len(gpus)
        self.users: dict[int, list[str]] = {}
        self.notes: list[str] = []
        monkeypatch.setattr(device, "count", lambda: len(self.gpus))
        monkeypatch.setattr(
            device, "detect", lambda i=0: self.gpus[i] if i < len(self.gpus) else None
        )
        monkeypatch.setattr(
            device, "environment", lambda i=0: Environment({"power_limit_w": self.watts[i]})
        )
        monkeypatch.setattr(device, "occupants", lambda i=0: self.users.get(i, []))

    def choose(self, devices: tuple[int, ...] | None) -> tuple[int, ...]:
        return choose(devices, self.notes.append)


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *gpus: Host(monkeypatch, *gpus)


@pytest.mark.parametrize(
    ("text", "devices"), [("0", (0,)), ("1,0", (1, 0)), ("3, 5", (3, 5)), ("all", None)]
)
def test_devices_are_read(text: str, devices: tuple[int, ...] | None) -> None:
    assert parse_devices(text) == devices


@pytest.mark.parametrize("text", ["", "-1", "0,,1", "0,0", "one", "0,", "all,0", "1.0"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: 0 or more, several as in 0,1, or all"):
        parse_devices(text)


@pytest.mark.parametrize(("devices", "chosen"), [("all", None), ("0", (0,))])
def test_commands_have_a_default_of_their_own(devices: str, chosen: Any) -> None:
    parser = argparse.ArgumentParser()
    add_machine(parser, devices)
    assert machine_of(parser.parse_args([]), None).devices == chosen
    assert machine_of(parser.parse_args(["--device", "1,2"]), None).devices == (1, 2)


def test_all_of_a_kind_are_used(create: Any) -> None:
    host = create(H200, H200, H200, H200)
    assert host.choose(None) == (0, 1, 2, 3) and host.choose((2, 1)) == (2, 1)
    assert host.choose((3,)) == (3,)
    assert host.notes == ["measuring on 4 GPUs: 0, 1, 2, 3", "measuring on 2 GPUs: 2, 1"]


def test_of_all_those_that_differ_are_left_out_with_the_reason(create: Any) -> None:
    host = create(H200, H100, H200, H200, replace(H200, sm_count=114))
    host.watts[3] = 500
    assert host.choose(None) == (0, 2)
    assert host.notes == [
        "device 1 is NVIDIA H100 80GB HBM3 (132 SMs), device 0 NVIDIA H200 (132 SMs): left out",
        "device 3 has power_limit_w 500, device 0 700: left out",
        "device 4 is NVIDIA H200 (114 SMs), device 0 NVIDIA H200 (132 SMs): left out",
        "measuring on 2 GPUs: 0, 2",
    ]


def test_one_that_was_named_and_differs_is_refused(create: Any) -> None:
    host = create(H100, H200, H200)
    with pytest.raises(ConfigError, match=r"device 0 is .*H100.*times of unlike GPUs"):
        host.choose((1, 0))
    assert host.choose((1, 2)) == (1, 2)


def test_of_all_those_that_others_use_are_left_out(create: Any) -> None:
    host = create(H200, H200)
    host.users[0] = ["pid 7 (train), 512 MiB"]
    assert host.choose(None) == (1,)
    assert host.notes == ["device 0 is used by pid 7 (train), 512 MiB: it is left out"]
    assert host.choose((0, 1)) == (0, 1) and "unsteady" in host.notes[-2]
    host.users[1] = ["pid 8 (serve)"]
    assert host.choose(None) == (0, 1), "somebody is on each: better unsteady than none"


def test_a_driver_that_does_not_say_who_computes_stops_nothing(
    create: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = create(H200)

    def fail(index: int) -> list[str]:
        raise BenchmarkError("NVML is missing")

    monkeypatch.setattr(device, "occupants", fail)
    assert host.choose(None) == (0,)
    assert host.notes == ["whether others use the GPU is not known: NVML is missing"]


def test_machines_that_cannot_measure(create: Any) -> None:
    empty = create()
    assert empty.choose(None) == empty.choose((0,)) == ()
    assert empty.notes == ["no GPU found: nothing is measured here"] * 2
    with pytest.raises(ConfigError, match="device=1 is not a CUDA device"):
        create(H200).choose((0, 1))
    old = create(replace(H200, name="Tesla T4", compute_capability="7.5"))
    assert old.choose(None) == () and "the kernels need 8.0 or newer" in old.notes[0]


def test_runners_measure_on_what_was_chosen(create: Any) -> None:
    host = create(H200, H200)
    with Runners(Machine(None), host.notes.append) as runners:
        assert runners.devices == (0, 1) and runners.gpu == H200
    with Runners(Machine(None, replay=True), host.notes.append) as runners:
        assert runners.devices == () and runners.gpu is None
