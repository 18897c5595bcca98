"""Options in nvcc's own variables: what enters keys and environments, and what does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_nvcc import Fake, faked, spec

from tuner.compile import nvcc_flags, single
from tuner.compile.toolchain import environment_facts
from tuner.measurement import Environment

HOST_ONLY = (
    "",
    "  ",
    "-ccbin=/opt/conda/bin/x86_64-conda-linux-gnu-c++",
    "-ccbin /usr/bin/g++",
    "--compiler-bindir '/my tools/g++' -w",
    "-allow-unsupported-compiler --threads=4",
)
CHANGING = ("-G", "-maxrregcount=64", "-ccbin=/usr/bin/g++ -lineinfo", "-Xcompiler=-DX", "'-G")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return faked(tmp_path, monkeypatch)


def identities(fake: Fake) -> tuple[str, ...]:
    """Keys of a template's kernel and of the sources, and an environment's digest."""
    sources = single.SOURCES
    for name in {name for one in sources for name in (one.name, *one.headers)}:
        (fake.templates / name).write_text("")
    environment = Environment(environment_facts(fake.toolchain))
    keys = (fake.compiler().key(spec(1)), *(one.key() for one in sources))
    return (*keys, environment.digest)


@pytest.mark.parametrize("variable", nvcc_flags.VARIABLES)
@pytest.mark.parametrize("text", HOST_ONLY)
def test_a_host_compiler_changes_no_key_and_no_environment(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    """A conda shell sets one, and the shipped proofs hold there."""
    before = identities(fake)
    monkeypatch.setenv(variable, text)
    assert identities(fake) == before


@pytest.mark.parametrize("variable", nvcc_flags.VARIABLES)
@pytest.mark.parametrize("text", CHANGING)
def test_flags_that_may_change_code_change_every_key_and_the_environment(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    before = identities(fake)
    monkeypatch.setenv(variable, text)
    assert all(one != other for one, other in zip(identities(fake), before, strict=True))


def test_the_environment_says_the_flags(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ccbin=/usr/bin/g++")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-ccbin /usr/bin/g++ -G")
    assert environment_facts(fake.toolchain)["nvcc_flags"] == "NVCC_APPEND_FLAGS=-G"


def test_keys_without_flags_are_those_of_the_shipped_proofs(fake: Fake) -> None:
    """Two empty texts: a key hashes exactly this."""
    ingredients = fake.compiler()._ingredients(spec(1))
    assert ingredients["environment"] == ["", ""]
    assert re.fullmatch("[0-9a-f]{32}", fake.compiler().key(spec(1)))
