"""`tuner build --portfolio` with a compiler that is not there: the list that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from named_artifacts import STATE, TOOLS, Compiler

from tuner.base import resources
from tuner.cli import build as command
from tuner.cli import main
from tuner.cli import portfolio as building
from tuner.compile import compiler, toolchain
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.families.block_scaled_gemm import rule as block_scaled
from tuner.families.by_operation import AttentionDomain, domain_of
from tuner.families.fused_attention import values_rule, wide_rule
from tuner.families.fused_attention_backward import rule as backward
from tuner.families.grouped_gemm import rule as grouped
from tuner.families.mla_decode import rule as latent
from tuner.measure.gate import REFERENCE
from tuner.selection import portfolio, transfer
from tuner.selection.kernel_list import Kernel, KernelList, Proof
from tuner.selection.kernels import path_of, targets
from tuner.selection.portfolio import shipped
from tuner.tuning import built
from tuner.tuning.proof import EarlierProofs

PROOF = Proof(64, 0, "NVIDIA H200", "580.1", "2026-11-23")
GROUPED = grouped.targets
BESIDE = 5
"""Libraries beside the kernels, the dispatcher among them."""
FULL = AttentionDomain(256, "full", "one")


@pytest.fixture(autouse=True)
def one_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A portfolio of one domain with one candidate, and none transferred: two kernels."""
    whole = next(one for one in shipped() if one.op == "attention")
    models = whole.domains[FULL]
    one = replace(whole, domains={FULL: replace(models, candidates=models.candidates[:1])})
    for module in (portfolio, building):
        monkeypatch.setattr(module, "shipped", lambda: (one,))
    monkeypatch.setattr(transfer.Transfer, "models_of", lambda self, domain: None)
    monkeypatch.setattr(compiler, "Compiler", Compiler)
    monkeypatch.setattr(toolchain, "find_toolchain", lambda: TOOLS)
    monkeypatch.setattr(command, "_beside", lambda library, artifacts: "there already")
    for rule in (backward, block_scaled, grouped, latent, values_rule, wide_rule):
        monkeypatch.setattr(rule, "targets", lambda: ())
    for name, value in STATE.items():
        monkeypatch.setattr(Compiler, name, copy(value))


def written() -> KernelList:
    return KernelList.read(path_of("13.0.88", "9.0"))


def test_every_candidate_has_kernels_of_both_types() -> None:
    (known,) = portfolio.shipped()
    found = targets(known)
    assert [target.problem.dtype for target in found] == ["float16", "bfloat16"]
    assert len({spec.key for target in found for spec in target.kernels.values()}) == 2


def test_run_time_parameters_make_no_further_kernels() -> None:
    known = next(one for one in shipped.__wrapped__() if one.op == "attention")  # type: ignore[attr-defined]
    found = [spec.key for target in targets(known) for spec in target.kernels.values()]
    own = [c for m in known.domains.values() for c in m.candidates if not c.is_vendor]
    assert len(found) == len(set(found)) < 2 * len(own)


def test_a_windowed_domain_has_a_causal_kernel_and_another() -> None:
    problems = AttentionDomain(64, "windowed", "prompt").problems("float16")
    assert [problem.is_causal for problem in problems] == [False, True]
    assert all(
        domain_of(problem) == AttentionDomain(64, "windowed", "prompt") for problem in problems
    )


def test_what_is_built_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--portfolio", "--gpu", "H200"]) == 0
    known = written()
    assert (known.nvcc, known.capability) == ("13.0.88", "9.0")
    assert all(one.is_current for one in known.kernels.values())
    assert len(known.kernels) == 3 and known.find(REFERENCE) is not None
    said = capsys.readouterr().err
    assert "3 of 3 kernels" in said
    assert "the kernel that appends to paged caches: there already" in said


def test_grouped_products_have_the_kernels_of_their_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = GROUPED()
    monkeypatch.setattr(grouped, "targets", GROUPED)
    assert main(["build", "--portfolio", "--op", "grouped_gemm", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("missing ") for line in lines)
    beside = [line.partition("missing   ")[2] for line in lines[len(ours) :]]
    assert beside == [
        *("the runtime's dispatcher", "the kernel of experts' rows"),
        *("the products of experts' few rows", "the quantiser of activations"),
    ]
    assert main(["build", "--portfolio", "--op", "grouped_gemm"]) == 0
    assert len(written().kernels) == len(ours) + 1
    assert "the kernel of experts' rows: there already" in capsys.readouterr().err


def test_a_gpu_without_a_portfolio_has_the_kernels_of_one_that_shares_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["build", "--portfolio", "--dry-run", "--gpu", "H200"])
    theirs = capsys.readouterr().out
    assert main(["build", "--portfolio", "--dry-run", "--gpu", "H100"]) == 0
    out, err = capsys.readouterr()
    assert out == theirs and out.count("missing ") == 2 + BESIDE
    assert "the portfolio of NVIDIA H200, rescaled to NVIDIA H100 80GB HBM3" in err


def test_a_dry_run_lists_and_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--portfolio", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("missing ") == 2 + BESIDE
    assert Compiler.built == [] and not path_of("13.0.88", "9.0").exists()
    main(["build", "--portfolio"])
    capsys.readouterr()
    main(["build", "--portfolio", "--dry-run"])
    assert capsys.readouterr().out.count("compiled ") == 2


def test_only_the_kernels_that_are_named_are_built() -> None:
    assert main(["build", "--portfolio", "--only", "D=256,bfloat16"]) == 0
    specs = [spec for spec in Compiler.built if spec != REFERENCE]
    assert [spec.variables["dtype"] for spec in specs] == ["bfloat16"]


def prove() -> None:
    kernels = [replace(one, proof=PROOF) for one in written().kernels.values()]
    written().with_kernels(kernels).write(path_of("13.0.88", "9.0"))


def test_a_second_build_keeps_the_proofs() -> None:
    main(["build", "--portfolio"])
    prove()
    assert main(["build", "--portfolio"]) == 0
    assert all(one.proof == PROOF for one in written().kernels.values())


def test_a_failed_kernel_stays_failed_where_its_proof_ships(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its artifact was removed, and the next build puts it into another library."""
    main(["build", "--portfolio"])
    failed, *others = (one for one in written().kernels.values() if one.spec != REFERENCE.key)
    shipped_too = [replace(one, proof=PROOF) for one in written().kernels.values()]
    monkeypatch.setattr(built, "shipped_kernels", lambda: shipped_too)
    fault = replace(failed, fault="wrong at S=1")
    written().with_kernels([fault]).write(path_of("13.0.88", "9.0"))
    monkeypatch.setattr(Compiler, "built", [])
    monkeypatch.setattr(ArtifactCache, "remove", lambda self, key: True)
    for company, options in ((8, []), (1, ["--reproducible"])):
        monkeypatch.setattr(Compiler, "company", company)
        assert main(["build", "--portfolio", *options]) == 0
        assert "1 of 2 kernels are proven and served, 1 failed before" in capsys.readouterr().err
        again = written().kernels[failed.spec]
        assert (again.proof, again.fault) == (None, "wrong at S=1")
        assert again.sha256 == ("sha of all" if company == 8 else f"sha of {failed.artifact}")
        assert all(written().kernels[one.spec].proof for one in others)


def test_a_list_that_others_can_write_is_neither_read_nor_replaced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["build", "--portfolio"])
    path = path_of("13.0.88", "9.0")
    before = path.read_text()
    path.chmod(0o666)
    assert main(["build", "--portfolio"]) == 1
    assert f"`chmod -R go-w {path}`" in capsys.readouterr().err and path.read_text() == before


def test_an_edit_of_one_template_keeps_the_others_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    main(["build", "--portfolio"])
    digest = resources.template_digest

    def edited(template: str) -> str:
        return "another" if template == REFERENCE.template else digest(template)

    monkeypatch.setattr(resources, "template_digest", edited)
    current = {one.spec for one in written().kernels.values() if one.is_current}
    assert len(current) == 2 and REFERENCE.key not in current


def test_a_list_of_the_first_version_is_taken_over() -> None:
    """A row of other templates stays where its artifact's key is today's."""
    main(["build", "--portfolio"])
    rows: list[dict[str, Any]] = [
        {"spec": one.spec, "artifact": one.artifact, "sha256": one.sha256, "fault": ""}
        | {"proof": {**asdict(PROOF), "code": one.code}}
        for one in written().kernels.values()
    ]
    rows.append({**rows[0], "spec": "gone", "artifact": "gone"})
    rows[1]["artifact"] = "0" * 32
    facts = {"nvcc": "13.0.88", "cutlass": "4.2.0", "capability": "9.0", "templates": "ef" * 32}
    old = {"format": "cutlass-tuner kernels", "version": 1, **facts, "kernels": rows}
    path_of("13.0.88", "9.0").write_text(json.dumps(old))
    assert not any(one.is_current for one in written().kernels.values())
    assert main(["build", "--portfolio"]) == 0
    assert all(one.is_current for one in written().kernels.values())
    proven = {one.spec for one in written().kernels.values() if one.proof == PROOF}
    assert proven == {rows[0]["spec"], rows[2]["spec"]} and len(written().kernels) == 3


def test_another_template_s_kernels_lose_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    main(["build", "--portfolio"])
    prove()
    monkeypatch.setattr(resources, "template_digest", lambda template: "another")
    assert main(["build", "--portfolio"]) == 0
    assert all(one.proof == PROOF for one in written().kernels.values())  # the same libraries
    monkeypatch.setattr(resources, "template_digest", lambda template: "a third")
    monkeypatch.setattr(Compiler, "version", "2")
    assert main(["build", "--portfolio"]) == 0
    assert all(one.source.startswith("a third") for one in written().kernels.values())
    assert all(one.proof is None for one in written().kernels.values())


@pytest.mark.parametrize("part", [["--only", "bfloat16"], ["--op", "attention"]])
def test_a_part_keeps_the_others_under_another_template(
    monkeypatch: pytest.MonkeyPatch, part: list[str]
) -> None:
    main(["build", "--portfolio"])
    prove()
    monkeypatch.setattr(resources, "template_digest", lambda template: "another")
    assert main(["build", "--portfolio", *part]) == 0
    assert len(written().kernels) == 3
    assert all(one.proof == PROOF for one in written().kernels.values())


def test_a_kernel_that_does_not_compile_is_not_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Compiler, "refuses", "bfloat16")
    assert main(["build", "--portfolio"]) == 1
    assert "1 kernel failed: nvcc refused" in capsys.readouterr().err
    types = [target.problem.dtype for target in targets(portfolio.shipped()[0])]
    assert types == ["float16", "bfloat16"] and len(written().kernels) == 2


def test_a_damaged_list_is_made_anew(capsys: pytest.CaptureFixture[str]) -> None:
    path = path_of("13.0.88", "9.0")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert main(["build", "--portfolio"]) == 0
    assert "made anew" in capsys.readouterr().err and len(written().kernels) == 3


def test_failures_outlive_a_damaged_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["build", "--portfolio"])
    failed, other = (one for one in written().kernels.values() if one.spec != REFERENCE.key)
    shipped_too = [replace(one, proof=PROOF) for one in written().kernels.values()]
    monkeypatch.setattr(built, "shipped_kernels", lambda: shipped_too)
    path = path_of("13.0.88", "9.0")
    known = written().with_kernels([replace(failed, fault="wrong at S=1")])
    path.write_text(known.text().replace(f'"{other.artifact}"', '"../damaged"'))
    assert main(["build", "--portfolio"]) == 0
    assert "made anew" in capsys.readouterr().err
    again = written().kernels[failed.spec]
    assert (again.proof, again.fault) == (None, "wrong at S=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "gemm"], "no portfolio ships for that (allowed: --op attention"),
        (["--gpu", "A100"], "GPU 'A100' is not known"),
        (["--jobs", "0"], "argument --jobs: 0 is out of range"),
        (["--only", "D=256,paged"], "no kernel of the portfolio has D=256, paged in its line"),
        (["--shape", "S=1024,D=64"], "not allowed with"),
    ],
)
def test_what_is_out_of_range_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["build", "--portfolio", *arguments])
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--dry-run", "--reproducible", "--only=D=256", "--force"])
def test_some_options_are_for_the_portfolio(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", option]) == 2
    assert f"{option.partition('=')[0]} is not for stored winners" in capsys.readouterr().err


@pytest.mark.parametrize(("company", "removed"), [(1, 2), (2, 0), (8, 2)])
def test_a_reproducible_build_makes_libraries_of_other_company_anew(
    company: int, removed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["build", "--portfolio"])
    monkeypatch.setattr(Compiler, "company", company)
    gone: list[str] = []
    monkeypatch.setattr(ArtifactCache, "remove", lambda self, key: gone.append(key))
    assert main(["build", "--portfolio", "--reproducible", "--dry-run"]) == 0
    assert gone == []
    assert main(["build", "--portfolio", "--reproducible"]) == 0
    assert len(gone) == removed
    (unit,) = Compiler.units[1:]
    assert [spec.key for spec in unit] == sorted(spec.key for spec in unit) and len(unit) == 2


def test_a_kernel_keeps_its_place_in_the_list() -> None:
    main(["build", "--portfolio"])
    kernel = next(iter(written().kernels.values()))
    assert isinstance(kernel, Kernel) and len(kernel.artifact) == 32


class TestAnotherBuild:
    """The same kernels under other keys, as another CUTLASS or other options of nvcc make them."""

    CODE = "c" * 32

    @pytest.fixture(autouse=True)
    def proven(self, monkeypatch: pytest.MonkeyPatch) -> KernelList:
        """A list of proven kernels whose artifacts are present; the next build has other keys."""
        monkeypatch.setattr(Artifact, "code", property(lambda artifact: self.CODE))
        main(["build", "--portfolio"])
        kernels = [
            replace(one, proof=PROOF, code=self.CODE)
            for spec, one in written().kernels.items()
            if spec != REFERENCE.key
        ]
        written().with_kernels(kernels).write(path_of("13.0.88", "9.0"))
        monkeypatch.setattr(built, "artifact_of", lambda known, kernel: kernel)
        monkeypatch.setattr(Compiler, "version", "2")
        newer = SimpleNamespace(nvcc_version="13.0.88", cutlass_version="4.7.0")
        monkeypatch.setattr(toolchain, "find_toolchain", lambda: newer)
        return written()

    def others(self, known: KernelList) -> dict[str, Kernel]:
        """Rows without the gate's kernel, which needs no proof."""
        return {spec: one for spec, one in known.kernels.items() if spec != REFERENCE.key}

    def test_proofs_of_equal_machine_code_are_carried_over(
        self, proven: KernelList, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["build", "--portfolio"]) == 0
        assert written().cutlass == "4.7.0"
        for spec, kernel in self.others(written()).items():
            assert kernel.artifact != proven.kernels[spec].artifact
            assert kernel.proof is not None
            assert kernel.proof.carried == proven.kernels[spec].artifact
        assert "2 proofs are of other artifacts with equal" in capsys.readouterr().err

    def test_a_failure_that_another_process_notes_meanwhile_stays(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        update = built.update

        def late(path: Path, change: Callable[[KernelList], KernelList]) -> None:
            replace(written(), faults={self.CODE: "wrong"}).write(path)
            update(path, change)

        monkeypatch.setattr(built, "update", late)
        assert main(["build", "--portfolio"]) == 0
        assert all(one.proof is None for one in self.others(written()).values())

    @pytest.mark.parametrize("variable", ["NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", ""])
    def test_proven_kernels_stay_where_the_new_ones_have_no_proof(
        self,
        variable: str,
        proven: KernelList,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        if variable:
            monkeypatch.setenv(variable, "-G")
        monkeypatch.setattr(Artifact, "code", property(lambda artifact: "d" * 32))
        assert main(["build", "--portfolio"]) == 0
        assert self.others(written()) == self.others(proven)
        assert written().kernels[REFERENCE.key] != proven.kernels[REFERENCE.key]
        said = capsys.readouterr().err
        assert "2 proven kernels stay in the list" in said and "`tuner prove --carry`" in said
        assert f"(unset {variable}, or --force" in said if variable else "(--force" in said
        assert main(["build", "--portfolio", "--force"]) == 0
        assert all(one.proof is None for one in self.others(written()).values())

    def test_proven_kernels_whose_artifacts_are_gone_are_replaced(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(built, "artifact_of", lambda known, kernel: None)
        monkeypatch.setattr(Artifact, "code", property(lambda artifact: "d" * 32))
        assert main(["build", "--portfolio"]) == 0
        assert all(one.proof is None for one in self.others(written()).values())

    def test_a_failed_artifact_takes_no_proof_over(self, proven: KernelList) -> None:
        kernel = next(iter(self.others(proven).values()))
        failed = replace(kernel, artifact="f" * 32, proof=None, fault="it is wrong")
        proofs = EarlierProofs([kernel, failed])
        assert proofs.find(kernel.spec, "e" * 32, self.CODE) is not None
        assert proofs.find(kernel.spec, "f" * 32, self.CODE) is None
        assert proofs.find(kernel.spec, "e" * 32, "d" * 32) is None
        assert proofs.find(kernel.spec, "e" * 32, "") is None
