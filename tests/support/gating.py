"""Kernels through the gate, for the tests of families on a GPU: own ones and vendors'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import pytest

from tuner.compile.compiler import Compiler
from tuner.compile.loading import LoadedKernel, load
from tuner.config import Config
from tuner.families import family
from tuner.families.base import SCRATCH, KernelSpec
from tuner.families.peers import Vendor
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import CapturedGraph, Device, Pool
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.gate.inputs import kinds_of, scale_of
from tuner.measure.gate.kernels import Guarded
from tuner.measure.subjects import WORKSPACE, CompiledSubject, Subject, VendorSubject
from tuner.measure.tolerance import Verdict
from tuner.measurement import Status
from tuner.problem import Problem

Case = tuple[Problem, Config]


def specs_of(cases: Sequence[Case]) -> list[KernelSpec]:
    """All kernels of some cases, and the gate's: what a module names in `kernels`."""
    every = (spec for problem, config in cases for spec in kernels_of(problem, config).values())
    return list(dict.fromkeys([REFERENCE, *every]))


def kernels_of(problem: Problem, config: Config) -> Mapping[str, KernelSpec]:
    return family(config.family).kernels(problem, config)


@dataclass(frozen=True)
class Gated:
    """The gate on the GPU, with what makes its candidates."""

    device: Device
    gate: Gate
    compiler: Compiler

    def loaded(self, problem: Problem, config: Config) -> dict[str, LoadedKernel]:
        named = kernels_of(problem, config)
        futures = dict(self.compiler.submit(list(named.values())))
        return {name: load(futures[spec].result()) for name, spec in named.items()}

    def subject(self, problem: Problem, config: Config) -> Subject:
        """A legal config's kernels, compiled; a vendor's call, or a skip with what it lacks."""
        member, scale = family(config.family), scale_of(problem)
        assert member.violations(problem, config, DEFAULT_GPU) == []
        if not isinstance(member, Vendor):
            loaded = self.loaded(problem, config)
            return CompiledSubject(self.device, member, problem, config, loaded, scale)
        if isinstance(reason := member.vendor_call(problem, config, scale), str):
            pytest.skip(reason)
        return VendorSubject(self.device, member, problem, config)

    def own(self, pool: Pool, subject: Subject) -> tuple[list[Guarded], dict[str, int]]:
        """Guarded workspace and scratch of a subject, and their addresses."""
        sizes = {WORKSPACE: subject.workspace_bytes, SCRATCH: subject.scratch_bytes}
        made = [self.gate.allocate(pool, name, size) for name, size in sizes.items()]
        return made, {guarded.name: guarded.pointer for guarded in made}

    def passes(self, problem: Problem, config: Config, kinds: Sequence[str] = ()) -> Verdict:
        """Every kind of input, or those named, with guarded scratch and workspace where the kernels
        want them. The verdict on the last one.
        """
        gate, subject = self.gate, self.subject(problem, config)
        gate.open(problem, 5)
        with Pool(self.device) as pool:
            own, pointers = self.own(pool, subject)
            is_vendor = isinstance(subject, VendorSubject)
            for kind in kinds or kinds_of(problem, is_vendor=is_vendor):
                gate.load(kind)
                buffers = {**gate.pointers, **pointers}
                call = subject.bind(buffers, scale_of(problem, kind), deliver=True)
                gate.arm(own)
                call()
                verdict = gate.examine(own)
                assert verdict.status is Status.OK, f"{kind}: {verdict.log}"
        subject.close()
        return verdict

    def replays(self, problem: Problem, config: Config) -> None:
        """A call captured once answers each kind of input; a vendor's, which may have copied them,
        those that it was bound with.
        """
        gate, subject = self.gate, self.subject(problem, config)
        is_vendor, scale = isinstance(subject, VendorSubject), scale_of(problem)
        kinds = ["random"] if is_vendor else kinds_of(problem, is_vendor=False)
        gate.open(problem, 5)
        gate.load("random")
        with Pool(self.device) as pool:
            own, pointers = self.own(pool, subject)
            call = subject.bind({**gate.pointers, **pointers}, scale, deliver=True)
            call()
            graph = subject.capture([call])
            for kind in (kind for kind in kinds if scale_of(problem, kind) == scale):
                gate.load(kind)
                gate.arm(own)
                graph.replay()
                verdict = gate.examine(own)
                assert verdict.status is Status.OK, verdict.log
            if isinstance(graph, CapturedGraph):  # torch's has no such method
                graph.close()
        subject.close()

    def outputs(self, problem: Problem, names: Sequence[str] = ()) -> list[bytes]:
        """Bytes of the outputs, or of those that are named."""
        wanted = [one for one in problem.outputs if not names or one.name in names]
        pointers = self.gate.pointers
        return [self.device.read(pointers[one.name], one.bytes) for one in wanted]

    def repeats(
        self,
        problem: Problem,
        config: Config,
        changed: Mapping[str, Callable[[bytes], bytes]] = MappingProxyType({}),
        kind: str = "random",
        count: int = 20,
        same: Sequence[str] = (),
    ) -> None:
        """Launches one by one, and of a graph, leave the same bits.

        Args:
            problem: problem of the calls.
            config: config of the calls.
            changed: changes of operands after the first call, which do not change its result.
            kind: kind of the inputs.
            count: calls of each way.
            same: outputs that are compared, where it is not all.
        """
        gate, subject = self.gate, self.subject(problem, config)
        gate.open(problem, 5)
        gate.load(kind)
        with Pool(self.device) as pool:
            own, pointers = self.own(pool, subject)
            call = subject.bind({**gate.pointers, **pointers}, scale_of(problem, kind))
            call()
            wanted = self.outputs(problem, same)
            for operand in problem.inputs:
                if change := changed.get(operand.name):
                    pointer = gate.pointers[operand.name]
                    self.device.write(pointer, change(self.device.read(pointer, operand.bytes)))
            graph = subject.capture([call])
            for launch in (*[call] * count, *[graph.replay] * count):
                gate.arm(own)
                launch()
                assert self.outputs(problem, same) == wanted
            graph.close()
        gate.close()
        subject.close()

    def judged(self, subject: Subject, problem: Problem, changed: Mapping[str, int]) -> Verdict:
        """The verdict on a call with other buffers for some operands, on what is loaded. The
        workspace is none.
        """
        self.gate.arm()
        subject.bind({**self.gate.pointers, WORKSPACE: 0, **changed}, scale_of(problem))()
        return self.gate.examine()
