"""The compiler over a fake nvcc: a script that builds in no time and can be told to fail."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_nvcc import Fake, faked, spec, specs

from tuner.base.processes import ProcessPool
from tuner.compile import compiler
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.units import UNLIKE, KernelJob, fitting, fixed_units
from tuner.config import Config
from tuner.errors import CompileError, RenderError, StoreError
from tuner.families.base import KernelSpec
from tuner.measurement import Resources

AVAILABLE_BYTES = compiler.available_bytes


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return faked(tmp_path, monkeypatch)


@pytest.fixture
def idle(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Compiler]]:
    """Makes compilers whose threads take no unit."""
    compilers: list[Compiler] = []

    def make(**options: Any) -> Compiler:
        compilers.append(fake.compiler(**options))
        monkeypatch.setattr(compilers[-1], "_wake", lambda times: None)
        return compilers[-1]

    yield make
    for made in compilers:
        made.close(cancel=True)


def taken(made: Compiler) -> Sequence[KernelJob]:
    """Jobs of the next unit."""
    unit = made._take()
    return unit.jobs


def test_kernels_are_built_in_units(fake: Fake) -> None:
    with fake.compiler(jobs=1, batch=4) as made:
        submitted = made.submit(specs(8))
        built = [future.result() for _, future in submitted]
    assert [s for s, _ in submitted] == specs(8)
    assert fake.runs == [4, 4]
    assert [a.key for a in built] == [made.key(s) for s in specs(8)]
    assert built[0].resources == Resources(4, 4, 8, 16, 0)
    assert built[0].facts["kernels_in_unit"] == 4
    assert built[0].compile_cpu_s > 0
    assert built[0].library.samefile(built[3].library)
    assert not built[0].library.samefile(built[4].library)
    source = (built[2].library.parent / "kernel.cu").read_text()
    assert source.endswith(f"struct kernel_{built[2].key} 2; // a")
    assert fake.leftovers() == []


def together(count: int) -> list[KernelSpec]:
    """Kernels of which a unit has three or more."""
    return [replace(spec, together=3) for spec in specs(count)]


@pytest.mark.parametrize(
    ("jobs", "kernels", "owner", "expected"),
    [
        *((jobs, specs(count), None, expected) for jobs, count, expected in (
            (16, 4, [1, 1, 1, 1]), (8, 4, [2, 2]), (8, 3, [2, 1]), (4, 4, [2, 2]), (4, 8, [4, 4]),
            (6, 5, [2, 2, 1]), (16, 12, [2] * 6), (2, 4, [4]), (1, 4, [4]),
        )),
        *((jobs, together(10), None, expected) for jobs, expected in (
            (64, [1] * 10), (16, [2, 2, 2, 2, 1, 1]), (8, [3, 3, 2, 2]),
        )),
        *((jobs, together(count), "a sweep", expected) for jobs, count, expected in (
            (16, 13, [1, 2, 2, 2, 2, 2, 2]), (16, 21, [1, 3, 3, 3, 3, 3, 3, 2]),
            (16, 22, [3] * 6 + [2, 2]), (2, 4, [4]), (4, 3, [1, 2]), (4, 4, [2, 2]),
        )),
    ],
)  # fmt: skip
def test_kernels_are_spread_over_the_cores(
    idle: Callable[..., Compiler],
    jobs: int,
    kernels: list[KernelSpec],
    owner: str | None,
    expected: list[int],
) -> None:
    """Over pairs of cores; those that share most together, and the first of a sweep alone."""
    made = idle(jobs=jobs)
    made.submit(kernels, owner)
    units = [made._take() for _ in range(jobs)]  # as `jobs` threads would
    assert [len(unit.jobs) for unit in units if unit] == expected
    assert owner or made._take() is None


def test_a_core_that_becomes_free_takes_a_full_unit(idle: Callable[..., Compiler]) -> None:
    made = idle(jobs=2)
    for one in specs(17):
        made.submit([one])
    made._take(), made._take()
    made._units.pop()
    assert len(taken(made)) == 1
    made.submit([spec(n) for n in range(20, 30)])
    made._units.pop()
    assert len(taken(made)) == 8


def test_a_unit_holds_the_oldest_kernel_and_those_most_like_it(
    idle: Callable[..., Compiler],
) -> None:
    made = idle(jobs=1, batch=3)
    made.submit(
        [
            KernelSpec("a.cu.j2", {"tile": tile, "stages": stages, "n": n})
            for n, (tile, stages) in enumerate([(64, 2), (128, 3), (64, 3), (128, 2), (64, 2)])
        ]
    )
    assert [job.spec.variables["n"] for job in taken(made)] == [0, 4, 2]
    made._units.pop()
    assert [job.spec.variables["n"] for job in taken(made)] == [1, 3]


def test_kernels_of_equal_instances_share_a_unit(idle: Callable[..., Compiler]) -> None:
    """Equal tiles count more than two other equal variables."""
    wanted = [
        KernelSpec("a.cu.j2", {"n": n, "tile": tile, "mask": mask, "early": mask},
                   instances=("tile",))
        for n, (tile, mask) in enumerate([(64, 0), (128, 0), (64, 1), (128, 1)])
    ]  # fmt: skip
    assert [[one.variables["n"] for one in unit] for unit in fixed_units(wanted, 2)] == [
        [1, 3],
        [0, 2],
    ]
    made = idle(jobs=1, batch=2)
    made.submit(wanted)
    assert [job.spec.variables["n"] for job in taken(made)] == [0, 2]


def test_a_unit_holds_few_unlike_kernels() -> None:
    """More of them would take more memory than is planned for."""

    def kernels(tiles: int, instances: tuple[str, ...]) -> list[KernelSpec]:
        variables = ({"tile": n % tiles, "n": n} for n in range(4 * tiles))
        return [KernelSpec("a.cu.j2", one, instances=instances) for one in variables]

    for tiles, instances, sizes in (
        (3, ("tile",), [12]),
        (UNLIKE, ("tile",), [16, 16]),
        (2 * UNLIKE, ("tile",), [16] * 4),
        (3, (), [UNLIKE, 4]),
    ):
        assert [len(unit) for unit in fixed_units(kernels(tiles, instances), 16)] == sizes
    rare = [KernelSpec("a.cu.j2", {"tile": n}, instances=("tile",)) for n in range(UNLIKE + 1)]
    assert [len(unit) for unit in fixed_units(rare, 16)] == [UNLIKE, 1]
    assert fitting([*rare[:2], KernelSpec("b.cu.j2", {})], 16) == 2


@pytest.mark.parametrize("jobs", [1, 6])
def test_fixed_units_depend_on_the_kernels_only(fake: Fake, jobs: int) -> None:
    wanted = [*specs(5), spec(9, "b.cu.j2")]
    units = fixed_units([*reversed(wanted), wanted[0]], 3)
    assert [len(unit) for unit in units] == [3, 2, 1]
    assert units == fixed_units(wanted, 3)
    with fake.compiler(jobs=jobs) as made:
        made.fix_units(units)
        ordered = [one for unit in units for one in unit]
        found = [future.result() for _, future in made.submit([spec(7), *ordered])][1:]
    assert [one.facts["kernels_in_unit"] for one in found] == [3, 3, 3, 2, 2, 1]
    assert len({one.sha256 for one in found}) == 3


def test_a_unit_holds_one_template(fake: Fake) -> None:
    with fake.compiler(jobs=1) as made:
        mixed = [s for pair in zip(specs(3), specs(3, "b.cu.j2"), strict=True) for s in pair]
        for _, future in made.submit(mixed):
            future.result()
    assert fake.runs == [3, 3]


def test_a_bad_kernel_never_costs_its_neighbours(fake: Fake) -> None:
    with fake.compiler(jobs=1) as made:
        futures = [f for _, f in made.submit([*specs(3), spec("BROKEN")])]
        for future in futures[:3]:
            assert future.result().facts["kernels_in_unit"] == 1
        with pytest.raises(CompileError) as raised:
            futures[3].result()
    assert sorted(fake.runs) == [1, 1, 1, 1, 4]
    assert str(raised.value) == "a.cu.j2: unit.cu(7): error: identifier is undefined"
    assert str(fake.toolchain.nvcc) in raised.value.command
    assert "take care" in raised.value.log
    assert fake.leftovers() == []


def test_work_that_failed_is_counted(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose unit was built twice costs its share of both."""
    run = ProcessPool.run
    monkeypatch.setattr(ProcessPool, "run", lambda *a: replace(run(*a), cpu_s=8.0))
    with fake.compiler(jobs=1) as made:
        (_, good), _ = made.submit([spec(1), spec("BROKEN")])
        assert good.result().compile_cpu_s == 4.0 + 8.0
        futures = [future for _, future in made.submit(specs(4)[2:])]
        assert [f.result().compile_cpu_s for f in futures] == [4.0, 4.0]


def test_the_compiler_killed_in_a_unit_is_tried_alone(fake: Fake) -> None:
    with fake.compiler(jobs=1) as made:
        (_, good), (_, bad) = made.submit([spec(1), spec("CRASH")])
        assert good.result().key == made.key(spec(1))
        with pytest.raises(CompileError, match="killed by signal 9"):
            bad.result()


def test_what_nvcc_rejected_is_not_tried_again(fake: Fake) -> None:
    with fake.compiler(jobs=1) as made:
        for _ in range(2):
            with pytest.raises(CompileError, match="is undefined"):
                made.submit([spec("BROKEN")])[0][1].result()
    assert fake.runs == [1]


def test_closing_waits_for_what_was_submitted_even_when_it_is_retried(fake: Fake) -> None:
    made = fake.compiler(jobs=1)
    futures = [f for _, f in made.submit([*specs(5), spec("BROKEN")])]
    made.close()
    assert [f.exception() is None for f in futures] == [True] * 5 + [False]


def test_what_is_built_is_found_again(fake: Fake) -> None:
    with fake.compiler() as made:
        assert made.cached(spec(1)) is None
        first = made.submit([spec(1)])[0][1].result()
        assert made.cached(spec(1)) == first
    with fake.compiler() as made:
        (_, future) = made.submit([spec(1)])[0]
        assert future.done()
        assert future.result() == first
    assert fake.runs == [1]


def test_a_corrupt_artifact_is_built_again(fake: Fake) -> None:
    with fake.compiler() as made:
        artifact = made.submit([spec(1)])[0][1].result()
        artifact.library.unlink()
        artifact.library.write_text("damaged")
        assert made.cached(spec(1)) is None
        again = made.submit([spec(1)])[0][1].result()
    assert (again.key, again.sha256) == (artifact.key, artifact.sha256)
    assert fake.runs == [1, 1]


def test_equal_specs_in_flight_are_one_compile(fake: Fake) -> None:
    with fake.compiler(jobs=1) as made:
        with fake.cache.lock(made.key(spec(1))):  # somebody else's: it waits
            (_, first), (_, second) = made.submit([spec(1), spec(1)])
            ((_, third),) = made.submit([spec(1)])
        assert first is second is third
        first.result()
    assert fake.runs == [1]


def test_submitting_does_not_wait(fake: Fake) -> None:
    made = fake.compiler(jobs=1)
    futures = [f for _, f in made.submit([spec(f"{n} SLEEP600") for n in range(9)])]
    assert not any(f.done() for f in futures)
    made.close(cancel=True)
    assert all(isinstance(f.exception() if not f.cancelled() else CancelledError(), CancelledError)
               for f in futures)  # fmt: skip


def test_a_future_can_be_cancelled_before_it_starts(fake: Fake) -> None:
    with fake.compiler(jobs=1) as made:
        with fake.cache.lock(made.key(spec(3))):  # somebody else's: it waits
            ((_, running),) = made.submit([spec(3)])
            while not running.running():
                time.sleep(0.001)
            (_, unwanted), (_, wanted) = made.submit([spec(1), spec(2)])
            assert unwanted.cancel()
        wanted.result()
        running.result()
        ((_, again),) = made.submit([spec(1)])
        assert again.result().key == made.key(spec(1))
    assert fake.runs == [1, 1, 1]


def change_toolchain(field: str, value: object) -> Callable[[Fake, pytest.MonkeyPatch], None]:
    def change(fake: Fake, _: pytest.MonkeyPatch) -> None:
        fake.toolchain = replace(fake.toolchain, **{field: value})

    return change


def write(name: str, text: str) -> Callable[[Fake, pytest.MonkeyPatch], None]:
    return lambda fake, _: (fake.templates / name).write_text(text)


INGREDIENTS: dict[str, Callable[[Fake, pytest.MonkeyPatch], object]] = {
    "nvcc": change_toolchain("nvcc_version", "13.1.0"),
    "cutlass": change_toolchain("cutlass_version", "4.3.0"),
    "cutlass headers": change_toolchain("cutlass_digest", "edited"),
    "template": write("a.cu.j2", "{% include 'part.j2' %}struct kernel_{{ id }} {{ n }}; // c"),
    "include": write("part.j2", '// new\n#include "header.h"\n'),
    "header": write("header.h", "// changed\n"),
    "flags": lambda _, patch: patch.setattr(compiler, "FLAGS", ("-O2",)),
    "append": lambda _, patch: patch.setenv("NVCC_APPEND_FLAGS", "-O1"),
    "prepend": lambda _, patch: patch.setenv("NVCC_PREPEND_FLAGS", "-O1"),
}


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_the_key_changes_with(fake: Fake, monkeypatch: pytest.MonkeyPatch, ingredient: str) -> None:
    before = fake.compiler().key(spec(1))
    INGREDIENTS[ingredient](fake, monkeypatch)
    after = fake.compiler().key(spec(1))
    assert len(before) == len(after) == 32
    assert before != after


def test_the_key_does_not_change_with_what_rendering_leaves_out(fake: Fake) -> None:
    before = fake.compiler().key(spec(1))
    text = "{% include 'part.j2' %}{# says nothing #}struct kernel_{{ id }} {{ n }}; // a"
    (fake.templates / "a.cu.j2").write_text(text)
    assert fake.compiler().key(spec(1)) == before


def test_a_template_may_follow_the_toolchain_s_cutlass(fake: Fake) -> None:
    text = "struct kernel_{{ id }} { {{- 'newer' if cutlass >= (4, 6) else 'older' -}} };"
    (fake.templates / "a.cu.j2").write_text(text)
    for version, expected in (("4.2.0", "older"), ("4.6.2", "newer"), ("4.10.0", "newer")):
        fake.toolchain = replace(fake.toolchain, cutlass_version=version)
        with fake.compiler(jobs=1) as made:
            artifact = made.submit([spec(1)])[0][1].result()
        assert expected in (artifact.library.parent / "kernel.cu").read_text()


def test_the_key_changes_with_the_variables_and_not_with_paths(fake: Fake, tmp_path: Path) -> None:
    made = fake.compiler()
    assert made.key(spec(1)) != made.key(spec(2))
    elsewhere = replace(
        fake.toolchain,
        nvcc=tmp_path / "other",
        cutlass=tmp_path / "other",
        library_dirs=(tmp_path,),
    )
    assert Compiler(elsewhere, fake.cache).key(spec(1)) == made.key(spec(1))


def test_a_full_disk_is_no_fault_of_the_kernel(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake.compiler(jobs=1) as made:
        for _ in range(2):  # and is tried again
            with pytest.raises(StoreError, match=r"the disk under .* is full"):
                made.submit([spec("FULL")])[0][1].result()
        assert fake.runs == [1, 1]

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "mkdir", full)
        with pytest.raises(StoreError, match="is full: free some space"):
            made.submit([spec(1)])[0][1].result()


def test_a_cache_that_cannot_be_written_is_said_by_the_future(fake: Fake) -> None:
    (fake.folder / "file").write_text("")
    fake.cache = ArtifactCache(fake.folder / "file" / "cache")
    with (
        fake.compiler() as made,
        pytest.raises(StoreError, match="cannot be written"),
    ):
        made.submit([spec(1)])[0][1].result()


def test_an_nvcc_that_cannot_start_is_said_by_the_future(fake: Fake) -> None:
    fake.toolchain = replace(fake.toolchain, nvcc=fake.folder / "gone")
    with fake.compiler() as made, pytest.raises(CompileError, match=r"gone cannot be started"):
        made.submit([spec(1)])[0][1].result()


def test_a_spec_that_does_not_render_costs_itself_alone(fake: Fake) -> None:
    with fake.compiler(jobs=1) as made:
        (_, bad), (_, good) = made.submit([KernelSpec("a.cu.j2"), spec(1)])
        assert good.result()
        with pytest.raises(RenderError, match="'n' is undefined"):
            bad.result()


@pytest.mark.parametrize(
    ("memory", "jobs", "expected"),
    [(1 << 40, 16, 16), (14 << 30, 16, 2), (1 << 30, 16, 1), (1 << 40, 1, 1)],
)
def test_memory_limits_the_units_at_a_time(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, memory: int, jobs: int, expected: int
) -> None:
    monkeypatch.setattr(compiler, "available_bytes", lambda: memory)
    assert fake.compiler(jobs=jobs).jobs == expected


def test_cpus_of_the_control_group_are_the_default(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "available_bytes", lambda: 1 << 40)
    monkeypatch.setattr(compiler, "cpu_count", lambda: 3)
    assert fake.compiler().jobs == 3


@pytest.mark.parametrize(
    ("limit", "current", "expected"),
    [("max", 900, 1000), (None, 900, 1000), (1500, 900, 700), (5000, 900, 1000), (500, 900, 0)],
)
def test_available_memory_is_the_machines_or_the_control_groups(
    tmp_path: Path, limit: object, current: int, expected: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   1000 kB\n")
    if limit is not None:
        kib = f"{limit * 1024}" if isinstance(limit, int) else limit
        (tmp_path / "memory.max").write_text(f"{kib}\n")
        (tmp_path / "memory.current").write_text(f"{current * 1024}\n")
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {100 * 1024}\n")
    assert AVAILABLE_BYTES(tmp_path, tmp_path) == expected * 1024


def test_the_command_holds_what_cutlass_needs(fake: Fake) -> None:
    fake.toolchain = replace(fake.toolchain, library_dirs=(Path("/cu13/lib"),))
    [command] = fake.compiler()._write(fake.folder, "a.cu.j2", "")
    cutlass = fake.toolchain.cutlass
    for part in (
        "-std=c++17",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-DCUTLASS_ENABLE_GDC_FOR_SM90",
        "-cudart=static",
        "-L/cu13/lib",
        f"-ccbin={fake.toolchain.host_compiler}",
        f"-I{cutlass}/include",
        f"-I{cutlass}/tools/util/include",
        f"-I{cutlass}/examples/88_hopper_fmha",
        f"-I{fake.templates}",
    ):
        assert part in command


def test_halves_that_are_compiled_apart_are_compiled_together(fake: Fake) -> None:
    made = fake.compiler()
    [command] = made._write(fake.folder, "a.cu.j2", '#include "host_half.h"\n')
    assert command[:2] == ["/bin/sh", "-c"]
    host, devices, wait, rest = command[2].splitlines()
    ptx, image = (shlex.split(part) for part in devices.removesuffix(" || exit").split(" && "))
    assembled, linked = (shlex.split(part) for part in rest.split(" && "))
    steps = {
        "host": shlex.split(host.removeprefix("{ ").removesuffix("; } &")),
        "ptx": ptx, "image": image, "assembled": assembled, "linked": linked,
    }  # fmt: skip
    ends = {name: [Path(part).name for part in step[-5:]] for name, step in steps.items()}
    assert ends["host"] == ["-c", "-Xcompiler=-S", "host.cpp", "-o", "host.s"]
    assert ends["ptx"][1:] == ["-ptx", "unit.cu", "-o", "unit.ptx"]
    assert ends["image"][1:] == ["-fatbin", "unit.ptx", "-o", "unit.fatbin"]
    assert ends["assembled"][1:] == ["-c", "host.s", "-o", "host.o"]
    assert ends["linked"][2:] == ["host.o", "-o", "kernel.so"]
    assert wait == "wait $! || exit"
    assert (fake.folder / "host.cpp").read_text() == '#include "unit.cu"\n'
    assert set(compiler.HOST_FLAGS) <= set(steps["host"])
    nvcc = [step for name, step in steps.items() if name != "assembled"]
    assert all(step[:3] == ptx[:3] for step in nvcc)


def test_steps_end_at_the_first_that_fails_and_count_together(fake: Fake) -> None:
    made = fake.compiler()
    say = [sys.executable, "-SE", "-c", "print('said')"]
    fail = [sys.executable, "-SE", "-c", "import sys; sys.exit(3)"]
    last, done = made._run([say, fail, say], fake.folder)
    assert (last, done.returncode, done.log) == (fail, 3, "said\n")
    last, done = made._run([say, say], fake.folder)
    assert (last, done.returncode, done.log) == (say, 0, "said\nsaid\n")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Priorities that processes were given."""
    priorities: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda which, pid, nice: priorities.append(nice))
    return priorities


def test_the_reference_is_compiled_before_others(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, given: list[int]
) -> None:
    with fake.compiler(jobs=1) as made:
        made.submit(specs(1))[0][1].result()
    usual = set(given)
    given.clear()
    monkeypatch.setattr(compiler, "_URGENT", frozenset({specs(1)[0].template}))
    with fake.compiler(jobs=1) as made:
        made.submit(specs(3)[2:])[0][1].result()
    assert usual == {10} and 0 in given


@pytest.mark.parametrize(
    ("jobs", "expected"), [(16, "--split-compile=4"), (2, "--split-compile=2")]
)
def test_the_reference_is_optimised_by_several_threads(
    fake: Fake, jobs: int, expected: str
) -> None:
    made = fake.compiler(jobs=jobs)
    [usual], [urgent] = (made._write(fake.folder, name, "") for name in ("a", "reference.cu.j2"))
    assert [part for part in urgent if part not in usual] == [expected]


def test_the_first_kernel_of_a_submitter_is_compiled_before_others(
    fake: Fake, given: list[int]
) -> None:
    with fake.compiler(jobs=1) as made:

        def is_urgent(number: int, owner: str | None) -> bool:
            given.clear()
            made.submit([spec(number)], owner)[0][1].result()
            return 0 in given

        assert [is_urgent(1, "one"), is_urgent(2, "one")] == [True, False]
        assert [is_urgent(3, "two"), is_urgent(4, None)] == [True, False]


def test_a_released_submitter_is_forgotten(idle: Callable[..., Compiler]) -> None:
    made = idle(jobs=1)
    for owner in range(5):
        made.submit([spec(owner)], owner)
        made.release(owner)
    assert not made._served
    made.submit([spec(7), spec(8)], 0)
    assert [job.is_first for job in made._pending] == [True, False]


def test_a_cached_kernel_is_a_submitter_s_first(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake.compiler(jobs=1)
    made.submit([spec(1)])[0][1].result()
    monkeypatch.setattr(made, "_wake", lambda times: None)
    made.submit([spec(1), spec(2)], "one")
    made.submit([spec(3), spec(4)], "two")
    assert [job.is_first for job in made._pending] == [False, True, False]
    made.close(cancel=True)


def test_each_capability_has_its_flags_and_its_keys(fake: Fake) -> None:
    hopper, ampere = fake.compiler(), fake.compiler(capability="8.0")
    assert compiler.flags("9.0") == compiler.FLAGS
    [command] = ampere._write(fake.folder, "a.cu.j2", "")
    assert "-gencode=arch=compute_80,code=sm_80" in command
    assert not [part for part in command if "90a" in part]
    assert len(compiler.flags("12.0")) == len(compiler.FLAGS)
    assert hopper.key(spec(1)) == fake.compiler(capability="9.0").key(spec(1))
    assert hopper.key(spec(1)) != ampere.key(spec(1))


def test_facts_are_kept_with_the_artifact(fake: Fake) -> None:
    with fake.compiler() as made:
        artifact = made.submit([spec(7)])[0][1].result()
    facts = json.loads((artifact.library.parent / "meta.json").read_text())["facts"]
    assert facts["template"] == "a.cu.j2"
    assert facts["variables"] == {"n": 7}
    assert (facts["nvcc"], facts["cutlass"]) == ("13.0.88", "4.2.0")


def test_what_needs_no_compiling_is_known(fake: Fake) -> None:
    class Family:
        def kernels(self, problem: object, config: Config) -> dict[str, KernelSpec]:
            return {str(n): spec(n) for n in config["tiles"]}

    space = [
        Config("planted", {"tiles": tiles, "raster": raster})
        for tiles in ((1,), (1, 2), ())
        for raster in "mn"
    ]
    with fake.compiler() as compiler:
        known: Any = Family(), None, space
        assert compiler.compiled(*known) == space[4:]
        compiler.submit([spec(1)])[0][1].result()
        assert compiler.compiled(*known) == [*space[:2], *space[4:]]
    assert fake.runs == [1]
