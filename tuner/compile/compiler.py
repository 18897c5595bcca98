"""Compilation of kernel specs to artifacts: translation units built by nvcc, several in parallel.

A unit holds up to `Compiler.batch` similar kernels of one template. Most of the time goes into
CUTLASS's headers and template instantiations, which kernels of one tile share. So a further kernel
costs a fraction of the first. If a unit fails, its kernels are built one by one.

A source that includes ``host_half.h`` has a device half, which nvcc compiles, and a host half for
the host compiler. Kernels in Triton take the same way: another program builds their units
(`tuner.compile.triton_compiler`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
import threading
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.base import resources
from tuner.base.limits import available_bytes, cpu_count
from tuner.base.processes import Finished, ProcessPool
from tuner.compile import nvcc_flags, side_by_side, triton_compiler
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.compile.ptxas import parse_advice, parse_resources
from tuner.compile.render import included, render, template_digest
from tuner.compile.toolchain import Toolchain, find_toolchain, include_dirs, numbers, path_option
from tuner.compile.units import (
    KernelJob,
    Underway,
    Unit,
    fitting,
    shared,
    unit_size,
)
from tuner.config import Config
from tuner.errors import CompileError, StoreError, TunerError
from tuner.families.base import Family, KernelSpec
from tuner.hardware import HOPPER
from tuner.problem import Problem

__all__ = ["Compiler", "Toolchain", "find_toolchain"]

FLAGS = (
    "-std=c++17",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-shared",
    "-cudart=static",
    "-Xcompiler=-fPIC",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-DNDEBUG",
    "-DCUTLASS_ENABLE_GDC_FOR_SM90",
    "-Xptxas=-v",
)
UNIT = 16
"""Maximum number of kernels in a translation unit. Eight of attention over pages, of five tiles,
take 91.1 CPU-seconds, and sixteen of these tiles 121.7 (two busy cores, 29 November 2026)."""
UNIT_BYTES = 7 << 30
"""Memory of one unit, as measured with nvcc 13.0. Eight unlike attention kernels take 7.1 GB at the
peak, eight similar ones 2.7 GB. Eight or sixteen of five tiles take 4.2 GB. Eight unlike products
take 7.0 GB, eight similar ones 5.1 to 6.2 GB."""
NVCC_TIMEOUT_S = 900.0
HOST_FLAGS = ("-Xcompiler=-fpermissive,-w",)
"""Flags for a separately compiled host half: device-only bodies name functions that g++ does not
know."""
SHARED_RUNTIME = "-Xlinker=--push-state,--no-as-needed,-lstdc++,--pop-state"
"""Flag that links libstdc++ as a shared library. Some host compilers default to a static one, whose
members need the build machine's newest glibc. Not part of a key: device code is the same.
"""
_HALVES = '#include "host_half.h"'
"""Marks sources whose device half nvcc compiles separately, which halves the CPU time."""
_UNFUSED = "// nvcc: -fmad=false\n"
"""Marks sources in which products and sums must not be fused into multiply-adds."""
_HOST = '#include "unit.cu"\n'
_EXTERNAL = '#ifdef __CUDACC__\nextern "C" void tuner_unit() {}\n#endif\n'
"""Function for a device half, which has no other external one: nvcc would put a process number into
the names of internal symbols. No code is made of it.
"""
_URGENT = frozenset({"reference.cu.j2"})
"""Templates that are compiled at the usual priority, before others: no candidate is checked without
the reference. The first kernel of a submitter is compiled so, too."""
SPLIT = 4
"""Threads for the optimiser and ptxas of an urgent template (``--split-compile``). The reference's
51 kernels take 16.4 CPU-seconds in place of 15.3, and both tools divide them among threads. Not
part of a key: each kernel has the same registers and memory."""
_LOG_LIMIT = 20_000
_PLACEHOLDER = "KERNEL_ID"
"""Stands for the kernel's id in the text that its key is computed from."""


class Compiler:
    """Compiles kernel specs in the background. One per process is enough.

    Args:
        toolchain: result of `find_toolchain`.
        artifacts: cache that is searched first and receives new artifacts.
        jobs: maximum number of nvcc processes (default: one a core). Fewer run if memory is short,
            at `UNIT_BYTES` each.
        batch: maximum number of kernels in a translation unit.
        timeout_s: seconds after which an nvcc process is killed.
        capability: target compute capability, as ``9.0``.
    """

    def __init__(
        self,
        toolchain: Toolchain,
        artifacts: ArtifactCache,
        jobs: int | None = None,
        batch: int = UNIT,
        timeout_s: float = NVCC_TIMEOUT_S,
        capability: str = HOPPER,
    ) -> None:
        self.toolchain = toolchain
        self.artifacts = artifacts
        self.capability = capability
        self.jobs = self._most_units(jobs)
        self.batch = max(1, batch)
        self._processes = ProcessPool(timeout_s)
        self._threads = ThreadPoolExecutor(self.jobs, thread_name_prefix="compile")
        self._lock = threading.Lock()
        self._pending: list[KernelJob] = []
        self._in_flight: dict[str, KernelJob] = {}
        self._rejected: dict[str, CompileError] = {}
        self._units: set[Unit] = set()
        self._served: set[Hashable] = set()
        """Submitters with a first kernel, until they release theirs."""
        self._fixed: dict[str, int] = {}
        self._stop = threading.Event()
        artifacts.sweep()

    def _most_units(self, jobs: int | None) -> int:
        """Number of units that may be built in parallel."""
        most = jobs or cpu_count()
        return max(1, min(most, available_bytes() // UNIT_BYTES))

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel=kind is not None)

    def key(self, spec: KernelSpec) -> str:
        """Artifact key, 32 hexadecimal digits. Equal keys mean the same device code.

        The host compiler is not part of the key: it only compiles the launch function. So a machine
        can build for another one that has a different host compiler.

        Raises:
            RenderError: when the spec does not render.
            CompileError: when it is a Triton kernel and Triton is not installed.
        """
        text = self.source(spec, _PLACEHOLDER)
        ingredients = {
            **self._ingredients(spec),
            "headers": {name: template_digest(name) for name in included(text)},
            "text": text,
        }
        return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:32]

    def source(self, spec: KernelSpec, kernel_id: str) -> str:
        """Text of a kernel for this toolchain's CUTLASS.

        Raises:
            RenderError: when the spec does not render.
        """
        return render(spec, kernel_id, numbers(self.toolchain.cutlass_version))

    def _ingredients(self, spec: KernelSpec) -> dict[str, Any]:
        """Part of a key that identifies the compiler."""
        tools = self.toolchain
        if triton_compiler.compiles(spec.template):
            return triton_compiler.ingredients(tools, self.capability)
        changing = nvcc_flags.code_flags()
        return {
            "nvcc": tools.nvcc_version,
            "flags": flags(self.capability),
            "environment": [changing.get(name, "") for name in nvcc_flags.VARIABLES],
            "cutlass": [tools.cutlass_version, tools.cutlass_digest],
        }

    def cached(self, spec: KernelSpec) -> Artifact | None:
        """Artifact of `spec` if it is already built, else None."""
        return self.artifacts.find(self.key(spec))

    def compiled(self, family: Family, problem: Problem, space: Sequence[Config]) -> list[Config]:
        """Configs of `space` whose kernels are all built already."""
        is_compiled: dict[KernelSpec, bool] = {}

        def is_built(spec: KernelSpec) -> bool:
            if spec not in is_compiled:
                is_compiled[spec] = self.cached(spec) is not None
            return is_compiled[spec]

        return [c for c in space if all(map(is_built, family.kernels(problem, c).values()))]

    def fix_units(self, units: Sequence[Sequence[KernelSpec]]) -> None:
        """Compile each of these groups as one unit from now on, whatever the number of cores, when
        its kernels are submitted together. Other kernels are grouped as usual.
        """
        with self._lock:
            for number, unit in enumerate(units, len(self._fixed)):
                self._fixed |= {self.key(spec): number for spec in unit}

    def submit(
        self, specs: Sequence[KernelSpec], owner: Hashable = None
    ) -> list[tuple[KernelSpec, Future[Artifact]]]:
        """Submit `specs` for compilation. Returns at once, in the same order.

        A spec that is cached, or already being compiled, is not compiled again. When a core becomes
        free, waiting kernels are grouped into units. The units are smaller if that keeps more cores
        busy.

        Args:
            specs: kernels to compile.
            owner: submitter that may `release` the specs later. With None they are never released.

        Returns:
            Futures of the artifacts. They raise CompileError (nvcc rejected the source; it has
            `command` and `log`), RenderError (the spec does not render) or StoreError (the cache
            cannot be written). After `close` or `release` they raise
            concurrent.futures.CancelledError.
        """
        futures: list[tuple[KernelSpec, Future[Artifact]]] = []
        added = 0
        for spec in specs:
            future: Future[Artifact] = Future()
            try:
                key = self.key(spec)
                artifact = self.artifacts.find(key)
            except TunerError as exc:
                future.set_exception(exc)
                futures.append((spec, future))
                continue
            with self._lock:
                if artifact is not None:
                    future.set_result(artifact)
                    self._served.add(owner)
                elif self._stop.is_set():
                    future.cancel()
                elif key in self._rejected:
                    future.set_exception(self._rejected[key])
                elif key in self._in_flight:
                    self._in_flight[key].owners.add(owner)
                    future = self._in_flight[key].future
                else:
                    is_first = owner is not None and owner not in self._served
                    job = KernelJob(spec, key, future, owners={owner}, is_first=is_first)
                    self._served.add(owner)
                    self._in_flight[key] = job
                    self._pending.append(job)
                    added += 1
            futures.append((spec, future))
        self._wake(added)
        return futures

    def release(self, owner: Hashable) -> None:
        """Release the specs that `owner` submitted, and return at once. Kernels without another
        owner are not started, and a unit of only such kernels is killed.
        """
        with self._lock:
            self._served.discard(owner)
            unwanted = [job for job in self._in_flight.values() if owner in job.owners]
            for job in unwanted:
                job.owners.discard(owner)
            dropped = [job for job in self._pending if not job.owners]
            self._pending = [job for job in self._pending if job.owners]
            units = [
                unit
                for unit in self._units
                if not unit.cancelled.is_set() and not any(job.owners for job in unit.jobs)
            ]
            for unit in units:
                unit.cancelled.set()
            for job in (*dropped, *(job for unit in units for job in unit.jobs)):
                self._forget(job)  # a later submission starts again
        for job in dropped:
            if not job.future.cancel():
                self._fail([job], CancelledError())
        for unit in units:
            if unit.folder is not None:
                self._processes.kill(unit.folder)

    def underway(self) -> dict[Future[Artifact], Underway]:
        """Kernels that are being built now."""
        now = time.monotonic()
        with self._lock:
            return {
                job.future: Underway(now - unit.began, len(unit.jobs))
                for unit in self._units
                for job in unit.jobs
            }

    def close(self, cancel: bool = False) -> None:
        """Close the compiler: wait for all submitted kernels, or with `cancel` kill their builds
        and remove the leftovers.
        """
        if cancel:
            with self._lock:
                self._stop.set()
                for unit in self._units:
                    unit.cancelled.set()
                dropped, self._pending = self._pending, []
            for job in dropped:
                if not job.future.cancel():
                    self._fail([job], CancelledError())
            self._processes.kill()
        self._threads.shutdown(wait=True)
        self._stop.set()

    def _wake(self, times: int) -> None:
        with contextlib.suppress(RuntimeError):  # closed: the running threads take the rest
            for _ in range(times):
                self._threads.submit(self._work)

    def _work(self) -> None:
        while (unit := self._take()) is not None:
            try:
                self._build(unit)
            except (TunerError, CancelledError) as exc:
                self._fail(unit.jobs, exc)
            except OSError as exc:
                self._fail(unit.jobs, self.artifacts.write_error(exc))
            except Exception as exc:  # an internal error must not leave a future waiting forever
                self._fail(unit.jobs, exc)
            finally:
                with self._lock:
                    self._units.discard(unit)

    def _take(self) -> Unit | None:
        """Next unit: the oldest job and the most similar ones. Idle threads get their share."""
        with self._lock:
            self._pending = [job for job in self._pending if self._starts(job)]
            if not self._pending:
                return None
            first = self._pending[0]
            fixed = self._fixed.get(first.key)
            alike = [
                job
                for job in self._pending
                if job.spec.template == first.spec.template
                and self._fixed.get(job.key) == fixed
                and not job.alone
            ]
            if fixed is None:
                # Both halves of a unit compile at once, so half as many units keep all cores busy.
                idle = max(1, self.jobs // 2 - len(self._units))
                size = unit_size(first, len(self._pending), idle, self.batch)
                alike.sort(key=lambda job: shared(first.spec, job.spec), reverse=True)
                alike = alike[: fitting([job.spec for job in alike], size)]
            unit = Unit([first] if first.alone else alike)
            self._pending = [job for job in self._pending if job not in unit.jobs]
            self._units.add(unit)
            if self._stop.is_set():
                unit.cancelled.set()
        return unit

    def _starts(self, job: KernelJob) -> bool:
        """Mark the jobs as running, after which their futures cannot be cancelled. Cancelled ones
        are dropped.
        """
        if job.future.running() or job.future.set_running_or_notify_cancel():
            return True
        self._forget(job)
        return False

    def _forget(self, job: KernelJob) -> None:
        """Remove a job from those in flight, unless another one has taken its place. The caller
        holds the lock.
        """
        if self._in_flight.get(job.key) is job:
            del self._in_flight[job.key]

    def _build(self, unit: Unit) -> None:
        """Compile one unit and resolve its futures. If it fails, its jobs are queued again to be
        built one by one.
        """
        with contextlib.ExitStack() as stack:
            # Locks are taken in one order everywhere, so that two processes never deadlock.
            for job in sorted(unit.jobs, key=lambda j: j.key):
                stack.enter_context(self.artifacts.lock(job.key, unit.cancelled))
            todo = [job for job in unit.jobs if not self._settle_found(job)]
            if not todo:
                return
            folder = stack.enter_context(self.artifacts.workspace())
            with self._lock:  # from here on it can be killed
                unit.folder = folder
            if unit.cancelled.is_set():
                raise CancelledError
            sources = {job.key: self.source(job.spec, job.key) for job in todo}
            commands = self._write(folder, todo[0].spec.template, "\n".join(sources.values()))
            is_urgent = todo[0].spec.template in _URGENT or any(job.is_first for job in todo)
            command, done = self._run(commands, folder, is_urgent)
            for job in todo:
                job.cpu_s += done.cpu_s / len(todo)
            if done.returncode != 0 and unit.cancelled.is_set():
                raise CancelledError
            elif done.returncode == 0:
                self._store(todo, folder / "kernel.so", sources, done.log)
            elif "No space left on device" in done.log or "Disk quota exceeded" in done.log:
                raise StoreError(
                    f"the disk under {self.artifacts.root} is full: the compiler could not write"
                )
            elif len(todo) > 1:
                for job in todo:
                    job.alone = True
                with self._lock:
                    self._pending[:0] = todo
                self._wake(len(todo))
            else:
                raise _compile_error(todo[0], command, done)

    def _store(
        self, jobs: Sequence[KernelJob], library: Path, sources: dict[str, str], log: str
    ) -> None:
        used = parse_resources(log, sources)
        advice = parse_advice(log, sources)
        tools = self.toolchain
        for job in jobs:
            artifact = self.artifacts.put(
                job.key,
                library,
                resources=used.get(job.key),
                compile_cpu_s=job.cpu_s,
                source=sources[job.key],
                facts={
                    "template": job.spec.template,
                    "variables": dict(job.spec.variables),
                    **self._versions(job.spec),
                    "host_compiler": tools.host_version,
                    "kernels_in_unit": len(jobs),
                    "advice": list(advice.get(job.key, ())),
                },
            )
            self._settle(job, artifact)

    def _versions(self, spec: KernelSpec) -> dict[str, str]:
        tools = self.toolchain
        if triton_compiler.compiles(spec.template):
            return {"triton": tools.triton_version, "capability": self.capability}
        return {"nvcc": tools.nvcc_version, "cutlass": tools.cutlass_version}

    def _run(
        self, commands: Sequence[list[str]], folder: Path, is_urgent: bool = False
    ) -> tuple[list[str], Finished]:
        """Run `commands` until one fails. Returns the last one run, and the result of all."""
        runs: list[Finished] = []
        priority = {"nice": 0} if is_urgent else {}
        for command in commands:
            if len(commands) == 1 and command[0] == str(self.toolchain.nvcc):
                planned = self._processes.run([*command, "--dryrun"], folder)
                script = (
                    side_by_side.script(command, planned.log) if planned.returncode == 0 else None
                )
                parallel = command if script is None else ["/bin/sh", "-c", script]
                runs.append(self._processes.run(parallel, folder, **priority))
            else:
                runs.append(self._processes.run(command, folder, **priority))
            if runs[-1].returncode != 0:
                break
        log = "".join(run.log for run in runs)
        cpu_s, wall_s = sum(run.cpu_s for run in runs), sum(run.wall_s for run in runs)
        return command, replace(runs[-1], cpu_s=cpu_s, wall_s=wall_s, log=log)

    def _write(self, folder: Path, template: str, text: str) -> list[list[str]]:
        """Write a unit's source into `folder`. Returns the commands that build its library."""
        tools = self.toolchain
        if triton_compiler.compiles(template):
            (folder / triton_compiler.UNIT).write_text(text, encoding="utf-8")
            return [triton_compiler.command(tools, self.capability)]
        (folder / "unit.cu").write_text(text, encoding="utf-8")
        nvcc = self._nvcc(template, text)

        def step(source: str, output: str, *options: str) -> list[str]:
            return [*nvcc, *options, str(folder / source), "-o", str(folder / output)]

        if _HALVES not in text:
            return [step("unit.cu", "kernel.so")]
        (folder / "unit.cu").write_text(text + _EXTERNAL, encoding="utf-8")
        (folder / "host.cpp").write_text(_HOST, encoding="utf-8")
        host = [step("host.cpp", "host.s", *HOST_FLAGS, "-c", "-Xcompiler=-S")]
        device = [
            step("unit.cu", "unit.ptx", "-ptx"),  # `-cubin` would write out all that it read, too
            step("unit.ptx", "unit.fatbin", "-fatbin"),
        ]
        assembled = str(folder / "host.o")
        libraries = [
            [str(tools.host_compiler), "-c", str(folder / "host.s"), "-o", assembled],
            step("host.o", "kernel.so"),
        ]
        return [["/bin/sh", "-c", side_by_side.together(host, device, libraries)]]

    def _nvcc(self, template: str, text: str) -> list[str]:
        """Return the compiler and the options of all steps of a unit."""
        tools = self.toolchain
        includes = (*include_dirs(tools.cutlass), resources.templates())
        return [
            str(tools.nvcc),
            *flags(self.capability),
            *(("-fmad=false",) if _UNFUSED in text else ()),
            *((f"--split-compile={min(SPLIT, self.jobs)}",) if template in _URGENT else ()),
            f"-ccbin={tools.host_compiler}",
            "-Xlinker=-s",  # symbols hold names of temporary files, which differ by build
            path_option("unit.cu"),
            SHARED_RUNTIME,
            *(f"-I{path}" for path in includes),
            *(f"-L{path}" for path in tools.library_dirs),
        ]

    def _settle_found(self, job: KernelJob) -> bool:
        """Resolve a job that another process built while this one waited for the lock."""
        artifact = self.artifacts.find(job.key)
        if artifact is not None:
            self._settle(job, artifact)
        return artifact is not None

    def _settle(self, job: KernelJob, artifact: Artifact) -> None:
        with self._lock:
            self._forget(job)
        job.future.set_result(artifact)

    def _fail(self, jobs: Sequence[KernelJob], exc: Exception) -> None:
        with self._lock:
            for job in jobs:
                self._forget(job)
                if isinstance(exc, CompileError) and exc.command:
                    self._rejected[job.key] = exc
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(exc)


def flags(capability: str) -> tuple[str, ...]:
    """Nvcc options for a compute capability; `FLAGS` are Hopper's."""
    if capability == HOPPER:
        return FLAGS
    number = capability.replace(".", "")
    target = f"-gencode=arch=compute_{number},code=sm_{number}"
    return tuple(target if flag.startswith("-gencode") else flag for flag in FLAGS)


def _compile_error(job: KernelJob, command: Sequence[str], done: Finished) -> CompileError:
    name = "Triton" if triton_compiler.compiles(job.spec.template) else "nvcc"
    if done.timed_out:
        reason = f"{name} was stopped after {done.wall_s:.0f} s"
    elif done.returncode < 0:
        reason = f"{name} was killed by signal {-done.returncode} (too little memory?)"
    else:
        errors = (line for line in done.log.splitlines() if re.search(r"\b(error|fatal)\b", line))
        reason = next(errors, f"{name} ended with {done.returncode}").strip()
    log = done.log
    if len(log) > _LOG_LIMIT:
        half = _LOG_LIMIT // 2
        log = f"{log[:half]}\n... {len(log) - 2 * half} characters left out ...\n{log[-half:]}"
    return CompileError(f"{job.spec.template}: {reason}", command=shlex.join(command), log=log)
