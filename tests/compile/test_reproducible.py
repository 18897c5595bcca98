"""Builds that do not depend on where and when they are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.bundle.wheel import MAX_GLIBC, newest_glibc
from tuner.compile import dispatcher
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.toolchain import find_host_compiler, find_toolchain
from tuner.families import families
from tuner.hardware import DEFAULT_GPU
from tuner.problem import SoftmaxProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]


def test_two_builds_are_equal_bytes(tmp_path: Path) -> None:
    """As the wheel of prebuilt kernels needs; each is a kernel by itself, in another folder."""
    family, problem = families()["softmax"], SoftmaxProblem.parse("M=1024,N=1024")
    config = family.space(problem, DEFAULT_GPU)[0]
    (spec,) = family.kernels(problem, config).values()
    found = []
    for name in ("a", "another"):
        cache = ArtifactCache(tmp_path / name)
        with Compiler(find_toolchain(), cache, jobs=1, batch=1) as compiler:
            ((_, future),) = compiler.submit([spec])
            found.append(future.result().sha256)
    assert found[0] == found[1]


def test_a_compiler_that_links_its_runtime_statically_makes_portable_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of a static libstdc++ need the newest glibc, which a wheel does not allow."""
    compiler, _ = find_host_compiler()
    wrapper = tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec "{compiler}" "$@" -static-libstdc++\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("NVCC_CCBIN", str(wrapper))
    family, problem = families()["softmax"], SoftmaxProblem.parse("M=1024,N=1024")
    config = family.space(problem, DEFAULT_GPU)[0]
    (spec,) = family.kernels(problem, config).values()
    with Compiler(find_toolchain(), ArtifactCache(tmp_path / "a"), jobs=1, batch=1) as building:
        ((_, future),) = building.submit([spec])
        library = future.result().library.read_bytes()
    assert b"libstdc++.so.6\0" in library
    assert newest_glibc(library) <= MAX_GLIBC


def test_a_dispatcher_is_equal_bytes_too(tmp_path: Path, shared_cache: Path) -> None:
    """One of the two is what the runtime's tests use, in the folder where they look for it."""
    pytest.importorskip("torch")
    places = shared_cache / "tests" / "dispatchers", tmp_path / "another"
    one, other = (dispatcher.build(ArtifactCache(place)) for place in places)
    if one.facts["host_compiler"] != other.facts["host_compiler"]:
        pytest.skip(f"the one in {places[0]} is of another compiler")
    assert one.sha256 == other.sha256
