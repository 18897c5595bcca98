"""Launches of ``scripts/sanitize``, and its reading of a tool's report; no GPU."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from math import ceil
from pathlib import Path

import fused_levers
import pytest
from sanitizer import command, targets, tools, variants, watched
from sanitizer.targets import Target

from tuner.base import resources
from tuner.compile.render import render
from tuner.errors import ConfigError
from tuner.families import families, family
from tuner.hardware import DEFAULT_GPU
from tuner.problem import (
    SCALE_BLOCK,
    AttentionProblem,
    GroupedGemmProblem,
)

FUSED = family("fused_attention")


@functools.cache
def listed(name: str) -> list[Target]:
    """A family's kernels; of plain attention at every third combination, whose spaces are large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_levers, "COMBINATIONS", fused_levers.COMBINATIONS[::3])
        return targets.targets([name], DEFAULT_GPU)


# --- what is launched ---


@pytest.mark.parametrize("name", targets.FAMILIES)
def test_every_kernel_is_legal_on_tiny_problems(name: str) -> None:
    labels = [target.label() for target in listed(name)]
    assert len(labels) == len({*labels}) >= 2
    for target in listed(name):
        member = FUSED if name in targets.OF_FUSED else family(name)
        assert target.family == member.name and target.launches and target.specs()
        for problem, config in target.launches:
            assert member.violations(problem, config, DEFAULT_GPU) == [], target.label()
            assert problem.flops < targets.MAX_FLOPS
            assert sum(operand.bytes for operand in problem.operands) < 1 << 26
            named = {operand.name for operand in problem.operands} | {"scratch", "lse"}
            for launch in member.launches(problem, config, 1.0):
                assert {ref.operand for ref in launch.tensors} <= named


def test_every_own_template_is_watched() -> None:
    """But for Triton's attention, and a family that is made of others' kernels."""
    own = {name for name, member in families().items() if not member.is_vendor}
    others = {"three_kernel_attention", "triton_attention"}
    assert own - {*targets.FAMILIES} == others


@pytest.mark.parametrize("name", ["gemm", "gemm_swiglu"])
def test_a_product_has_more_tiles_than_multiprocessors_and_cut_ones(name: str) -> None:
    for target in targets.targets([name], DEFAULT_GPU):
        problem, config = target.launches[-1]
        assert len(target.launches) == 4
        rows, columns = problem.m, problem.n * (2 if name == "gemm_swiglu" else 1)
        if config["swap_ab"]:
            rows, columns = columns, rows
        tiles = ceil(rows / config["tile_m"]) * ceil(columns / config["tile_n"])
        assert tiles > DEFAULT_GPU.sm_count
        assert rows % config["tile_m"] and problem.k % config["tile_k"]


def test_groups_have_more_tiles_than_multiprocessors() -> None:
    for target in targets.targets(["grouped_gemm"], DEFAULT_GPU):
        problem, config = target.launches[-1]
        assert isinstance(problem, GroupedGemmProblem)
        along_m, along_n = config["tile_m"], config["tile_n"]
        if config["swap_ab"]:
            along_m, along_n = along_n, along_m
        of_groups = [ceil(rows / along_m) * ceil(problem.n / along_n) for rows in problem.rows]
        assert sum(of_groups) > DEFAULT_GPU.sm_count and not all(of_groups)


# --- what the watched process does ---


def test_the_watched_process_loads_no_torch() -> None:
    program = f"import sys; sys.path[:] = {sys.path}; import sanitizer.watched"
    program += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


class Memory:
    """Takes the place of a device and of its pools."""

    def __init__(self, device: object = None) -> None:
        self.sizes: list[int] = []

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def allocate(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) << 40

    def write(self, pointer: int, data: bytes) -> None:
        assert len(data) == self.sizes[(pointer >> 40) - 1]

    def synchronize(self) -> None:
        return


class Calls:
    """Takes the place of a config's kernels."""

    scratch_bytes, workspace_bytes = 48, 256

    def __init__(self) -> None:
        self.count, self.buffers = 0, {}

    def bind(self, buffers: dict[str, int], scale: float) -> Calls:
        self.buffers = buffers
        return self

    def __call__(self) -> None:
        self.count += 1


@pytest.mark.parametrize("name", [*targets.FAMILIES][1:])
@pytest.mark.parametrize("is_control", [False, True])
def test_each_buffer_is_as_large_as_it_has_to_be(
    monkeypatch: pytest.MonkeyPatch, name: str, is_control: bool
) -> None:
    target = targets.targets([name], DEFAULT_GPU)[0]
    problem, config = target.launches[0]
    halved = targets.halved_of(target) if is_control else ""
    memory, calls = Memory(), Calls()
    monkeypatch.setattr(watched, "Pool", lambda device: memory)
    monkeypatch.setattr(watched, "subject", lambda *_: calls)
    item = {"problem": problem.to_json(), "config": config.to_json(), "halved": halved}
    watched.launch(memory, json.loads(json.dumps(item)), {})  # type: ignore[arg-type]
    got = {key: memory.sizes[(pointer >> 40) - 1] for key, pointer in calls.buffers.items()}
    wanted = {operand.name: operand.bytes for operand in problem.operands}
    wanted |= {"scratch": 48, "workspace": 256}
    if is_control:
        wanted[halved] //= 2
    if isinstance(problem, AttentionProblem):
        wanted["lse"] = 4 * problem.batch * problem.heads_q * problem.seqlen_q
    assert got == wanted and len(memory.sizes) == len(got) and calls.count == 2


# --- what is said of it ---


def test_the_verdict_is_read() -> None:
    clean = "========= ERROR SUMMARY: 0 errors\n"
    races = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
    wrong = "========= Invalid __global__ write\n========= ERROR SUMMARY: 3 errors\n"
    assert tools.judge(clean, is_control=False) == ("clean", 0)
    assert tools.judge(races, is_control=False) == ("errors", 2)
    assert tools.judge(wrong, is_control=False) == ("errors", 3)
    assert tools.judge("killed\n", is_control=False) == ("failed", 0)
    assert tools.judge(clean, is_control=True) == ("not seen", 0)
    assert tools.judge(wrong, is_control=True) == ("seen", 3)


STUB = """#!/bin/sh
case "$1" in
  *memcheck*) for plan; do :; done
    echo "========= ERROR SUMMARY: $(grep -c '"halved": "d"' "$plan") errors" ;;
  *racecheck*) sleep 30 ;;
  *synccheck*) echo "========= ERROR SUMMARY: 0 errors"; exit 1 ;;
esac
"""


def test_a_tool_that_hangs_or_dies_costs_one_run(tmp_path: Path) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(STUB)
    program.chmod(0o755)
    runs = command.runs_of(targets.targets(["gemv"], DEFAULT_GPU)[:1], tools.TOOLS)
    come: list[tools.Seen] = []
    seen = tools.Sanitizer(str(program), {}, timeout_s=2.0, budget_s=60.0).run(runs, 2, come.append)
    assert sorted(map(str, come)) == sorted(map(str, seen))
    assert [s.status for s in seen] == ["seen", "clean", "timeout", "failed"]
    assert "racecheck: 1 timeout" in tools.table(seen)
    seen = tools.Sanitizer(str(program), {}, timeout_s=60.0, budget_s=1.0).run(runs[2:3] * 3, 1)
    assert [s.status for s in seen] == ["timeout", "not run", "not run"]


def test_each_family_has_a_control() -> None:
    wanted = targets.targets(["gemm", "softmax"], DEFAULT_GPU)
    runs = command.runs_of(wanted, tools.TOOLS)
    assert [(run.target.family, run.tool, run.halved) for run in runs if run.halved] == [
        ("gemm", "memcheck", "bias"),
        ("softmax", "memcheck", "probabilities"),
    ]
    assert len(runs) == 2 + len(wanted) * len(tools.TOOLS)
    assert not any(run.halved for run in command.runs_of(wanted, ["racecheck"]))


def test_what_does_not_compile_is_not_launched() -> None:
    target = targets.targets(["two_kernel_attention"], DEFAULT_GPU)[0]
    assert command.without(target, {}) == target
    assert command.without(target, {target.specs()[1]: "why"}).launches == ()


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--tools lint is unknown \(allowed: memcheck"):
        command.main(["--tools", "memcheck,lint"])
    with pytest.raises(
        ConfigError, match=r"^--family conv is unknown \(allowed: fused_attention, "
    ):
        command.main(["--family", "gemm,conv"])


# --- kernels with a change of their text ---


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_a_variant_changes_the_kernels_and_leaves_the_project(name: str) -> None:
    own = resources.templates()
    (target,) = command.chosen(
        targets.targets(["fused_attention_backward"], DEFAULT_GPU),
        ["window=100,dtype=bf16 ds_stages=1"],
        name,
    )
    assert target.label().endswith(f"({name})")
    (spec,) = target.specs()
    plain = render(spec, "k")
    with variants.rendered_as(name):
        changed = render(spec, "k")
    assert resources.templates() == own and render(spec, "k") == plain
    assert "if (lane == 0) Empty::arrive" in plain and "if (lane == 0)" not in changed
    assert "q_empty[i], 4 * kGroups" in plain and "q_empty[i], 128 * kGroups" in changed
    with variants.rendered_as("every-lane"):
        every_lane = render(spec, "k")
    assert (changed == every_lane) == (name == "every-lane")


def test_every_lane_of_fused_attention_arrives_too() -> None:
    specs = [spec for target in listed(FUSED.name) for spec in target.specs()]
    by_persistence = {bool(spec.variables["persistent"]): spec for spec in specs}
    assert len(by_persistence) == 2
    for spec in by_persistence.values():
        plain = render(spec, "k")
        with variants.rendered_as("every-lane"):
            changed = render(spec, "k")
        assert "if (tid % 32 == 0) Empty::arrive(empty)" in plain
        assert "if (tid % 32 == 0) Empty::arrive(empty)" not in changed
        assert "q_empty, 4 * kGroups" in plain and "q_empty, 128 * kGroups" in changed
        assert "% 32 == 0) Empty::arrive(&s.tile_empty" not in changed


@pytest.mark.parametrize("name", ["block_scaled_gemm", "block_scaled_grouped_gemm"])
def test_stages_of_block_scaled_products_are_used_twice(name: str) -> None:
    watched = targets.targets([name], DEFAULT_GPU)
    for target in watched:
        config = target.launches[0][1]
        blocks = max(problem.k for problem, _ in target.launches) // SCALE_BLOCK
        assert blocks // config.get("split_k", 1) >= config["stages"], target.label()
    for target in watched[::4]:
        (spec,) = target.specs()
        plain = render(spec, "k")
        with variants.rendered_as("every-lane"):
            changed = render(spec, "k")
        assert "if (lane == 0) arrive(empty);" in plain
        assert "if (lane == 0) arrive(empty);" not in changed
        assert "kGroups * kWarpGroup * kMulticast" in changed


def test_a_change_without_its_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.cu.j2").write_text("text")
    variants.change(tmp_path, [variants.Change(("a.cu.j2",), "t(e)xt", r"\g<1>")])
    assert (tmp_path / "a.cu.j2").read_text() == "e"
    with pytest.raises(ConfigError, match=r"a\.cu\.j2 has no text"):
        variants.change(tmp_path, [variants.Change(("a.cu.j2",), "text", "")])


def test_only_kernels_that_are_asked_for_are_watched() -> None:
    listed = targets.targets(["gemv"], DEFAULT_GPU)
    assert command.chosen(listed, [], "") == listed
    assert command.chosen(listed, ["gemv", listed[0].name], "") == listed[:1]
    with pytest.raises(ConfigError, match="no such kernel"):
        command.chosen(listed, ["gemv", "no such kernel"], "")
