"""Proofs that ship are those of the kernels that today's templates, families and flags make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tuner.base import resources
from tuner.compile import render as render_module
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.toolchain import Toolchain, find_cutlass, headers_digest
from tuner.errors import CompileError
from tuner.families.base import KernelSpec
from tuner.families.by_operation import rules
from tuner.measure.gate import REFERENCE
from tuner.selection.kernel_list import KernelList
from tuner.selection.kernels import targets
from tuner.selection.portfolio import everywhere

PROOFS = sorted((resources.cache() / "proofs").glob("*.json"))
CUTLASS = {"4.2.0": "b919e7493a10e6ad049f0d77518bb4b9b2a7e9c888ed5ec807bfd2566031d69e"}
"""Digests of the headers of CUTLASS's releases (`headers_digest`), which artifacts' keys hold."""
REMEDY = (
    "if the text was meant to change: tuner build --portfolio, tuner prove --carry, tuner prove, "
    "then tuner prove --export cache/proofs"
)


@pytest.fixture(scope="module")
def specs() -> Mapping[str, KernelSpec]:
    """Specs of all portfolios and rules."""
    wanted = [target for one in everywhere() for target in targets(one)]
    wanted += [target for rule in rules() for target in rule.targets()]
    return {spec.key: spec for target in wanted for spec in target.kernels.values()}


@pytest.fixture
def compiler(known: KernelList, tmp_path: Path) -> Iterator[Compiler]:
    """A compiler of the list's versions, whose programs are not there."""
    nothing, digest = tmp_path / "nothing", CUTLASS[known.cutlass]
    tools = Toolchain(
        nothing, known.nvcc, nothing, "", nothing, known.cutlass, cutlass_digest=digest
    )
    cache = ArtifactCache(tmp_path / "artifacts")
    with Compiler(tools, cache, jobs=1, capability=known.capability) as made:
        yield made


@pytest.fixture(params=PROOFS, ids=lambda path: path.stem)
def known(request: pytest.FixtureRequest) -> KernelList:
    return KernelList.read(request.param)


def test_each_proof_is_of_a_kernel_that_is_made_today(
    known: KernelList,
    compiler: Compiler,
    specs: Mapping[str, KernelSpec],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An artifact's key covers the rendered text, the headers, the flags and the versions."""
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    rows = [row for row in known.kernels.values() if row.spec in specs]
    lost = [row for row in rows if compiler.key(specs[row.spec]) != row.artifact]
    every, missing = (Counter(row.spec.partition("{")[0] for row in part) for part in (rows, lost))
    said = [f"{name}: {count} of {every[name]} proofs are lost" for name, count in missing.items()]
    assert rows and not lost, "\n".join([*said, f"first {lost[0].spec}", REMEDY])


def test_each_proof_is_of_a_kernel_that_a_portfolio_or_a_rule_names(
    known: KernelList, specs: Mapping[str, KernelSpec]
) -> None:
    """Another name of a variable, too, would lose the proofs."""
    unnamed = Counter(spec.partition("{")[0] for spec in known.kernels if spec not in specs)
    said = [f"{name}: nothing names {count} kernels with proofs" for name, count in unnamed.items()]
    assert not said, "\n".join(
        [*said, "if they are meant to go: tuner prove --export cache/proofs"]
    )


def test_each_row_is_a_proof(known: KernelList) -> None:
    assert known.faults == {}
    assert all(row.proof and row.code and not row.source for row in known.kernels.values())


def test_a_template_s_digest_covers_all_that_rendering_reads(
    specs: Mapping[str, KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an include whose name is computed, and headers."""
    names = set[str]()
    load = jinja2.FileSystemLoader.get_source

    def noted(loader: jinja2.FileSystemLoader, environment: jinja2.Environment, name: str) -> Any:
        names.add(name)
        return load(loader, environment, name)

    monkeypatch.setattr(jinja2.FileSystemLoader, "get_source", noted)
    folder = resources.templates().resolve()
    kinds = {(spec.template, spec.variables.get("head_dim")): spec for spec in specs.values()}
    for spec in [*kinds.values(), REFERENCE]:
        render_module._environment.cache_clear()
        names.clear()
        text = render_module.render(spec, "x")
        wanted = {folder / name for name in (*names, *render_module.included(text))}
        assert spec.template in names and wanted <= set(resources.sources(spec.template))


def test_the_headers_of_cutlass_are_those_of_the_proofs() -> None:
    try:
        folder, version = find_cutlass()
    except CompileError as exc:
        pytest.skip(str(exc))
    if version not in CUTLASS:
        pytest.skip(f"no proof is of CUTLASS {version}")
    assert headers_digest(folder) == CUTLASS[version]
