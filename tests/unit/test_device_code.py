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


Sections = dict[str, tuple[int, bytes]]


def cubin(sections: Sections, machine: int = 190, link: int = 0) -> bytes:
    """An ELF file of named sections: info and contents. Names of symbols are in section `link`."""
    names, bodies, at = b"\0", b"", 64
    rows = [(0, 0, 0, 0, 0)]
    for name, (info, body) in sections.items():
        rows.append((len(names), info, at + len(bodies), len(body), link))
        names += name.encode() + b"\0"
        bodies += body
    rows.append((len(names), 0, at + len(bodies), len(names) + 10, 0))
    names += b".shstrtab\0"
    table = at + len(bodies) + len(names)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<H", header, 18, machine)
    struct.pack_into("<Q", header, 40, table)
    struct.pack_into("<3H", header, 58, 64, len(rows), len(rows) - 1)
    packed = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, link, info, 1, 0)
        for name, info, offset, size, link in rows
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


UNIT = "_ZN37_INTERNAL_b4b1bceb_7_unit_cu_597edf59"
PLACES = (".nv.global.init", ".nv.constant3", ".nv.global")


def with_variables(key: str, variables: list[tuple[str, str, bytes]]) -> bytes:
    """A library of a kernel, with variables by section, name and value."""
    texts, table = b"\0", struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    contents = dict.fromkeys(PLACES, b"")
    for place, name, value in variables:
        number, at = 2 + PLACES.index(place), len(contents[place])
        table += struct.pack("<IBBHQQ", len(texts), 1, 0, number, at, len(value))
        texts += name.encode() + b"\0"
        contents[place] += value
    sections: Sections = {".strtab": (0, texts)}
    sections |= {place: (0, content) for place, content in contents.items()}
    sections |= {".symtab": (0, table), f".text.k_{key}": (1 << 24, CODE)}
    return cubin(sections, link=1)


OWN = (".nv.constant3", f"_ZN34k_{KEY}5tableE", b"\1\2")
LOCAL = (".nv.global.init", f"{UNIT}34k_{KEY}5startE", b"\3\4")
SHARED = (".nv.global.init", f"{UNIT}4cuda3tabE", b"\5\6")
NEIGHBOUR = (".nv.constant3", f"_ZN34k_{OTHER}5tableE", b"\7\x08")
UNUSED = (".nv.global", f"{UNIT}4cute1_E", b"\0")
ALL = [OWN, LOCAL, SHARED, NEIGHBOUR, UNUSED]


@pytest.mark.parametrize(
    ("changed", "is_seen"),
    [
        ([(*OWN[:2], b"\1\xff"), *ALL[1:]], True),
        ([OWN, (*LOCAL[:2], b"\3"), *ALL[2:]], True),
        ([*ALL[:2], (*SHARED[:2], b"\5\xff"), *ALL[3:]], True),
        ([(OWN[0], LOCAL[1], OWN[2]), (LOCAL[0], OWN[1], LOCAL[2]), *ALL[2:]], True),
        ([*ALL, (".nv.global", f"_ZN34k_{KEY}4pageE", b"\0")], True),
        ([*ALL[:3], (*NEIGHBOUR[:2], b"\xff"), UNUSED], False),
        ([*ALL[:3], UNUSED], False),
        (ALL[:4], False),
        (ALL[::-1], False),
        ([(one[0], one[1].replace("b4b1bceb", "00000000"), one[2]) for one in ALL], False),
    ],
)
def test_variables_are_part_of_the_code(
    changed: list[tuple[str, str, bytes]], is_seen: bool
) -> None:
    """A kernel's own, and initialised ones of no kernel; not those of the unit's other kernels."""
    first = device_code(with_variables(KEY, ALL), KEY)
    assert first and (device_code(with_variables(KEY, changed), KEY) != first) == is_seen


def test_code_without_variables_has_the_hash_that_proofs_hold() -> None:
    """Proofs that ship compare by it: it must not change."""
    assert device_code(library(KEY), KEY) == "2d82f743c8e2f1df7d6fe641063f534f"


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
