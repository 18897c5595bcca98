"""Builds that do not depend on where and when they are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.toolchain import find_toolchain
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
