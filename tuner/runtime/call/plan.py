"""Plans: lookup results resolved to launches of an own kernel, or to a vendor's function."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tuner.base import document
from tuner.compile import background
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.loading import LoadedKernel, load, loaded
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import family
from tuner.families.base import LSE, SCRATCH, Family, Launch, Strides
from tuner.families.peers import (
    FLEX,
    MEASURED_ONLY,
    installed,
    may_answer,
    off_rows,
    owner_of,
)
from tuner.measurement import Measurement, Provenance, Status
from tuner.problem import GemmProblem, GroupedGemmProblem, Problem
from tuner.problem.base import contiguous
from tuner.runtime.call import counters, devices, native
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.selection.reader import LookupResult

#: Workspaces start at multiples of this many bytes, as separate allocations would.
_ALIGNMENT = 256


@dataclass(frozen=True)
class Posed:
    """The problem of a call, and the other facts that its launch needs."""

    problem: Problem
    """Problem to look up."""
    scale: float = 1.0
    """Factor of attention's scores; alpha of a product."""
    estimated: Problem | None = None
    """Problem of sequences of unlike lengths that a selection estimates in its place."""
    shape: tuple[int, ...] = ()
    """Shape of the output, contiguous; empty: that of the problem's output."""
    strides: Strides = field(default_factory=dict)
    """Strides of tensors that differ from the problem's operands. In dimensions of one element they
    are the operand's."""
    needs_lse: bool = False
    """True when the log-sum-exp is wanted, which peers do not write."""
    run: Callable[[Plan | None], object] | None = field(default=None, compare=False)
    """Function that enqueues the call by a plan, or by PyTorch for None, to be timed. None: the
    call is not to be timed."""


@dataclass(frozen=True, eq=False)
class Plan(ABC):
    """Launches for the calls of one problem and scale on one device."""

    problem: Problem
    config: Config
    device: int
    by_portfolio: bool = field(default=False, kw_only=True)
    """True when a portfolio selected the configuration by its expected time."""

    @property
    def owner(self) -> str:
        """Owner of a vendor's kernel; empty for own ones."""
        return ""

    @property
    def has_lse(self) -> bool:
        """True when `run_with_lse` can be called."""
        return False

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return self.problem.output.shape

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Enqueue the call on the current stream of the plan's device, and count it.

        Args:
            inputs: tensors in the order of `problem.operands`, on the plan's device.

        Returns:
            The output, newly allocated, with the strides of `problem.output`.

        Raises:
            BenchmarkError: when a launch is refused. Earlier steps of the plan were enqueued. They
                write only to the output, the log-sum-exp and the workspace, all of which are
                dropped.
            RuntimeError: torch's own, or an asynchronous CUDA error reported here. The CUDA context
                is lost then.
        """
        out = self._on_device(inputs, None)
        counters.count_hit(self.by_portfolio, self.owner)
        return out

    def run_uncounted(self, *inputs: torch.Tensor) -> torch.Tensor:
        """As `run`, without counting a hit."""
        return self._on_device(inputs, None)

    def run_with_lse(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `run`, with attention's log-sum-exp (natural logarithm): fp32 (B, H, SQ), or (1, H,
        total_q) for packed sequences.
        """
        batch, heads, rows, _ = self.out_shape
        lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=inputs[0].device)
        out = self._on_device(inputs, lse)
        counters.count_hit(self.by_portfolio, self.owner)
        return out, lse

    def run_all(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As `run`, with all outputs of a problem that has several."""
        if devices.current() == self.device:
            outs = self._enqueue_all(inputs)
        else:
            with devices.use(self.device):
                outs = self._enqueue_all(inputs)
        counters.count_hit(self.by_portfolio, self.owner)
        return outs

    def _on_device(self, inputs: Sequence[torch.Tensor], lse: torch.Tensor | None) -> torch.Tensor:
        if devices.current() == self.device:
            return self._enqueue(inputs, lse)
        with devices.use(self.device):
            return self._enqueue(inputs, lse)

    @abstractmethod
    def _enqueue(
        self, inputs: Sequence[torch.Tensor], lse: torch.Tensor | None
    ) -> torch.Tensor: ...

    def _enqueue_all(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (self._enqueue(inputs, None),)


@dataclass(frozen=True, eq=False)
class VendorPlan(Plan):
    """A vendor's kernel, called through torch."""

    call: Callable[..., torch.Tensor]
    shape: tuple[int, ...] = ()
    """Shape of the output; empty: the problem's own."""

    @property
    def owner(self) -> str:
        return owner_of(self.config.get("kernel"))

    def _enqueue(self, inputs: Sequence[torch.Tensor], lse: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = self._called(inputs)
        return out.view(self.shape) if self.shape else out

    def _enqueue_all(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(self._called(inputs))

    def _called(self, inputs: Sequence[torch.Tensor]) -> Any:
        try:
            return native.call(self.call, *inputs)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as exc:
            raise BenchmarkError(str(exc)) from exc


@dataclass(frozen=True)
class Step:
    """One kernel launch of a plan, without the addresses of a call."""

    kernel: LoadedKernel
    launch: Callable[[Sequence[int], int, int], None]
    """The kernel with `integers` and `scalars` bound to it."""
    tensors: tuple[tuple[int, int], ...]
    """For each tensor: index of the call's address, and the offset in bytes from it. The addresses
    are those of inputs, outputs, workspace and log-sum-exp, in this order."""
    integers: tuple[int, ...]
    scalars: tuple[float, ...]
    workspace_at: int
    """Offset in the call's workspace, bytes."""


@dataclass(frozen=True, eq=False)
class KernelPlan(Plan):
    """Own kernels, launched one after the other."""

    shape: tuple[int, ...]
    """Shape of the output."""
    strides: tuple[int, ...]
    steps: tuple[Step, ...]
    workspace_bytes: int
    dtype: torch.dtype
    writes_lse: bool
    further: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...] = ()
    """Shape, strides and type of every output but the last."""

    @property
    def has_lse(self) -> bool:
        return self.writes_lse

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.shape

    def sized(
        self,
        problem: Problem,
        scale: float,
        strides: Strides | None = None,
        config: Config | None = None,
    ) -> KernelPlan:
        """A plan of the same kernels for the sizes of another problem, as arguments of launches.

        Args:
            problem: problem of the same class that the config is legal for. `Plan.problem` stays.
            scale: scale that the plan was resolved with.
            strides: strides of operands that differ from the problem's.
            config: the plan's with other run-time parameters; None: the plan's.

        Raises:
            ConfigError: when the kernels do not support these strides.
        """
        config = config or self.config
        member = family(config.family)
        if strides is None:
            launches = member.launches(problem, config, scale)
        else:
            strided = member.strided_launches(problem, config, scale, strides)
            if isinstance(strided, str):
                raise ConfigError(strided)
            launches = strided
        offset, steps = self.steps[0].workspace_at, []
        for known, launch in zip(self.steps, launches, strict=True):
            steps.append(_step(problem, known.kernel, launch, offset))
            offset += _aligned(known.kernel.workspace_bytes(launch.integers))
        *others, output = problem.outputs
        return replace(
            self,
            shape=output.shape,
            strides=output.strides,
            further=tuple(
                (one.shape, one.strides, dtype)
                for one, (*_, dtype) in zip(others, self.further, strict=True)
            ),
            steps=tuple(steps),
            workspace_bytes=offset,
        )

    def run_into(
        self, out: torch.Tensor, lse: torch.Tensor | None, *inputs: torch.Tensor
    ) -> torch.Tensor:
        """As `run`, with the output in the caller's memory. Only addresses of the tensors are read.

        Args:
            out: tensor with the shape and strides of the plan's output.
            lse: tensor for the log-sum-exp, as of `run_with_lse`; None: not wanted.
            inputs: as of `run`.

        Returns:
            `out`.
        """
        if devices.current() == self.device:
            self._launch(inputs, (out,), lse)
        else:
            with devices.use(self.device):
                self._launch(inputs, (out,), lse)
        counters.count_hit(self.by_portfolio, self.owner)
        return out

    def _enqueue(self, inputs: Sequence[torch.Tensor], lse: torch.Tensor | None) -> torch.Tensor:
        out = self._allocated(inputs, self.shape, self.strides, self.dtype)
        self._launch(inputs, (out,), lse)
        return out

    def _enqueue_all(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        every = *self.further, (self.shape, self.strides, self.dtype)
        outs = tuple(self._allocated(inputs, *one) for one in every)
        self._launch(inputs, outs, None)
        return outs

    @staticmethod
    def _allocated(
        inputs: Sequence[torch.Tensor],
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=inputs[0].device)

    def _launch(
        self,
        inputs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        lse: torch.Tensor | None,
    ) -> None:
        devices.bind(self.device)
        base = 0
        if self.workspace_bytes:
            device = inputs[0].device
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)
            base = workspace.data_ptr()
        addresses = [tensor.data_ptr() for tensor in inputs]
        addresses += [tensor.data_ptr() for tensor in outs]
        addresses += base, 0 if lse is None else lse.data_ptr()
        stream = devices.stream_of(self.device)
        for step in self.steps:
            # A null address stays null: the kernel skips that tensor.
            tensors = [(at := addresses[which]) and at + offset for which, offset in step.tensors]
            try:
                step.launch(tensors, base + step.workspace_at, stream)
            except BenchmarkError as exc:
                if exc.status in (Status.ILLEGAL_ACCESS, Status.TIMEOUT):
                    raise RuntimeError(
                        f"CUDA error at {self.config.family}, of it or of an earlier kernel: {exc}"
                    ) from exc
                raise


class Excluded(NamedTuple):
    """Kernels that this process must not launch for a problem."""

    configs: Collection[Config] = ()
    """Configs whose launch was refused."""
    artifacts: Collection[str] = ()
    """Keys of artifacts, even if present."""

    def refusal(self, config: Config, artifacts: Collection[str]) -> Refusal | None:
        """Reason not to launch a config with these artifacts; else None."""
        text = ""
        if config in self.configs:
            text = "failed in this process"
        elif any(key in self.artifacts for key in artifacts):
            text = "is not compiled on every rank"
        return Refusal(Kind.UNAVAILABLE, f"{config.family} {text}") if text else None


def resolve(posed: Posed, answer: LookupResult, device: int, excluded: Excluded) -> Plan | Refusal:
    """Plan of the best measured candidate that this machine can run, or why there is none.

    Predicted, replayed and failed candidates are skipped.

    Args:
        posed: problem of the call, and its strides.
        answer: lookup result for the problem.
        device: index of the current device.
        excluded: kernels that must not be launched.
    """
    problem, reasons = posed.problem, list[str]()
    for measurement in answer.candidates:
        config, keys = measurement.config, measurement.artifacts.values()
        if measurement.provenance is not Provenance.MEASURED:
            reasons.append(f"{config.family} is {measurement.provenance}, not measured")
        elif not measurement.ok or measurement.problem != problem:
            reasons.append(f"{config.family} did not pass for this problem")
        else:
            plan = excluded.refusal(config, keys) or plan_of(posed, measurement, device)
            if not isinstance(plan, Refusal) or plan.kind is not Kind.UNAVAILABLE:
                return plan
            reasons.append(plan.detail)
    why = "; ".join(dict.fromkeys(reasons)) or "the entry has no candidates"
    return Refusal(Kind.UNAVAILABLE, f"{problem.label()}: {why}")


def plan_of(posed: Posed, measurement: Measurement, device: int) -> Plan | Refusal:
    """The plan of one candidate; a refusal of this one (`Kind.UNAVAILABLE`), or of all of them."""
    config = measurement.config
    try:
        member = family(config.family)
        make = _vendor_plan if member.is_vendor else own_plan
        return make(posed, member, measurement, device)
    except (BenchmarkError, ConfigError) as exc:
        text = str(exc)
    except document.FAULTS as exc:
        text = f"{config.family} here is another version than the entry's ({exc!r})"
    return Refusal(Kind.UNAVAILABLE, text)


def _vendor_plan(
    posed: Posed, member: Family, measurement: Measurement, device: int
) -> Plan | Refusal:
    """As `own_plan`, of a vendor's config; a refusal where PyTorch's answer is the vendor's."""
    problem, config = posed.problem, measurement.config
    kernel = config.get("kernel")
    if kernel == FLEX and getattr(problem, "block_mask", ""):
        return Refusal(Kind.VENDOR, problem.label())
    if kernel in MEASURED_ONLY:
        raise ConfigError(f"{kernel} is measured, and not served")
    if not may_answer(kernel):
        raise ConfigError(f"{kernel} may not answer (TUNER_ANSWERS)")
    if posed.needs_lse and owner_of(kernel) != "pytorch":
        raise ConfigError(f"{kernel} does not write the log-sum-exp")
    if reason := _other_build(str(kernel), measurement):
        raise ConfigError(reason)
    if member.is_listed and posed.strides:  # it is called with addresses alone
        raise ConfigError(f"{member.name} takes no strides but those of its layouts")
    if reason := off_rows(problem, posed.strides):
        raise ConfigError(f"{member.name} takes no {reason}")
    if problem.op in (GemmProblem.op, GroupedGemmProblem.op) and not member.is_listed:
        # PyTorch chooses cuBLAS or cuBLASLt for the whole process, not for a call: its own call
        # is the vendor's kernel. A loop over groups cannot be captured as it was timed.
        return Refusal(Kind.VENDOR, problem.label())
    if posed.estimated is not None:
        if faults := member.violations(posed.estimated, config, measurement.gpu):
            raise ConfigError("; ".join(faults))
    # `vendor_call` runs the kernel once, which must not come back here under `tuner.enable`.
    call = native.call(member.vendor_call, problem, config, posed.scale)
    if isinstance(call, str):
        raise ConfigError(call)
    is_selected = measurement.provenance is Provenance.PREDICTED
    return VendorPlan(
        problem, config, device, call=call, shape=posed.shape, by_portfolio=is_selected
    )


def _other_build(kernel: str, measurement: Measurement) -> str:
    """Reason not to serve a measured peer whose package has changed since; else empty."""
    measured = measurement.environment.facts.get(owner_of(kernel))
    here = installed.build_of(kernel)
    if not here or measured is None or measured == here:
        return ""
    return (
        f"{kernel} is of {here}, measured was {measured} (tuner entries revalidate times it here)"
    )


def own_plan(posed: Posed, member: Family, measurement: Measurement, device: int) -> KernelPlan:
    """The plan of an own config.

    Raises:
        ConfigError: when it cannot run here: an artifact is missing, say.
        BenchmarkError: when a kernel cannot be loaded.
    """
    cache = ArtifactCache()
    kernels: dict[str, LoadedKernel] = {}
    for name, key in measurement.artifacts.items():
        kernel = loaded(key)  # without hashing it again for each new length of a generation
        if kernel is None:
            artifact = cache.find(key)
            if artifact is None:
                if measurement.provenance is Provenance.MEASURED and devices.ranks() == 1:
                    _request(measurement)
                raise ConfigError(
                    f"artifact {key} of {member.name} is not in the cache (tuner build makes it)"
                )
            kernel = load(artifact)
        kernels[name] = kernel
    problem, config = posed.problem, measurement.config
    shape, output = posed.shape, problem.output
    if posed.strides:
        launches = member.strided_launches(problem, config, posed.scale, posed.strides)
    else:
        launches = member.launches(problem, config, posed.scale)
    if isinstance(launches, str):
        raise ConfigError(launches)
    steps: list[Step] = []
    offset = _aligned(member.scratch_bytes(problem, config))
    for launch in launches:
        if launch.kernel not in kernels:
            raise ConfigError(f"{member.name} names no artifact for its kernel '{launch.kernel}'")
        kernel = kernels[launch.kernel]
        # One workspace for each launch: with programmatic dependent launch two kernels overlap.
        steps.append(_step(problem, kernel, launch, offset))
        offset += _aligned(kernel.workspace_bytes(launch.integers))
    if not steps:
        raise ConfigError(f"{member.name} has no launches for {problem.label()}")
    return KernelPlan(
        problem,
        config,
        device,
        shape=shape or output.shape,
        strides=contiguous(shape) if shape else posed.strides.get(output.name, output.strides),
        steps=tuple(steps),
        workspace_bytes=offset,
        dtype=getattr(torch, output.dtype),
        writes_lse=member.writes_lse,
        further=tuple(
            (one.shape, posed.strides.get(one.name, one.strides), getattr(torch, one.dtype))
            for one in problem.outputs[:-1]
        ),
        by_portfolio=measurement.provenance is Provenance.PREDICTED,
    )


def _request(measurement: Measurement) -> None:
    """Have the kernels of an entry built in the background."""
    keys = tuple(measurement.artifacts.values())

    def is_wanted() -> bool:
        cache = ArtifactCache()
        return any(cache.find(key) is None for key in keys)

    background.request(measurement.problem, measurement.gpu.name, is_wanted)


def _step(problem: Problem, kernel: LoadedKernel, launch: Launch, workspace_at: int) -> Step:
    names = [*(operand.name for operand in problem.operands), SCRATCH, LSE]
    tensors = tuple((names.index(ref.operand), ref.offset_bytes) for ref in launch.tensors)
    call = kernel.bind(launch.integers, launch.scalars)
    return Step(kernel, call, tensors, launch.integers, launch.scalars, workspace_at)


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT
