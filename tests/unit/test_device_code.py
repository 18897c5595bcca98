"""Hashes of machine code, of ELF files that are put together here."""

from __future__ import annotations

import struct

import pytest

from tuner.compile.device_code import DIGITS, device_code
from tuner.config import Config
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Regime, Resources, Status
from tuner.problem import GemmProblem

KEY, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2
CODE = bytes(range(64))


def cubin(sections: dict[str, tuple[int, bytes]], machine: int = 190) -> bytes:
    """An ELF file of named sections: info and contents."""
    names, bodies, at = b"\0", b"", 64
    rows = [(0, 0, 0, 0)]
    for name, (info, body) in sections.items():
        rows.append((len(names), info, at + len(bodies), len(body)))
        names += name.encode() + b"\0"
        bodies += body
    rows.append((len(names), 0, at + len(bodies), len(names) + 10))
    names += b".shstrtab\0"
    table = at + len(bodies) + len(names)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<H", header, 18, machine)
    struct.pack_into("<Q", header, 40, table)
    struct.pack_into("<3H", header, 58, 64, len(rows), len(rows) - 1)
    packed = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, 0, info, 1, 0)
        for name, info, offset, size in rows
    )
    return bytes(header) + bodies + names + packed


def library(key: str, code: bytes = CODE, registers: int = 168, constant: bytes = b"\1") -> bytes:
    name = f"_ZN34k_{key}6kernelE"
    one = {
        f".text.{name}": (registers << 24 | 3, code),
        f".nv.constant4.{name}": (0, constant),
        ".nv.info": (0, key.encode()),
    }
    beside = {f".text._ZN34k_{'9' * 32}6kernelE": (1 << 24, b"beside it")}
    return b"\x7fELF host" + b"\0" * 90 + cubin(one) + b"..." + cubin(beside)


def test_the_name_is_no_part_of_the_code() -> None:
    found = device_code(library(KEY), KEY)
    assert len(found) == DIGITS
    assert device_code(library(OTHER), OTHER) == found


@pytest.mark.parametrize(
    "changed",
    [
        library(KEY, code=CODE[:-1] + b"\xff"),
        library(KEY, registers=160),
        library(KEY, constant=b"\2"),
    ],
)
def test_what_runs_is(changed: bytes) -> None:
    assert device_code(changed, KEY) not in ("", device_code(library(KEY), KEY))


def test_no_code_is_said_where_there_is_none() -> None:
    assert device_code(library(KEY), OTHER) == ""
    assert device_code(b"", KEY) == ""
    assert device_code(b"\x7fELF", KEY) == ""
    assert device_code(cubin({f".text.k_{KEY}": (0, CODE)}, machine=62), KEY) == ""
    whole = cubin({f".text.k_{KEY}": (0, CODE)})
    assert device_code(whole, KEY) and all(
        device_code(whole[:end], KEY) == "" for end in range(0, len(whole), 7)
    )


def measured(artifact: str, code: str) -> Measurement:
    resources = {"main": Resources(168, 0, 0, 0, code=code)}
    made = Measurement(
        GemmProblem(64, 64, 64), Config("gemm", {"tile": 1}), DEFAULT_GPU, Regime(), Status.OK
    )
    return made.but(artifacts={"main": artifact}, resources=resources)


def test_the_code_is_stored_where_it_is_known() -> None:
    known, unknown = measured(KEY, "c" * 32), measured(KEY, "")
    assert known.to_json()["resources"]["main"]["code"] == "c" * 32
    assert "code" not in unknown.to_json()["resources"]["main"]
    assert Measurement.from_json(known.to_json()) == known
    assert Measurement.from_json(unknown.to_json()) == unknown
