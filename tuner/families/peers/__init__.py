"""Base of the vendors' families: one parameter ``kernel``, and a trial run of each call through
torch before its first use.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from tuner import settings
from tuner.base.install import extra_command, version_of
from tuner.config import Config
from tuner.families.base import Domain, Family, Strides
from tuner.hardware import DEFAULT_GPU, TMA_ALIGNMENT_BYTES, Gpu
from tuner.problem import (
    DTYPE_BYTES,
    AttentionBackwardProblem,
    AttentionProblem,
    Layout,
    Operand,
    Problem,
)

FAILURES = (
    RuntimeError,  # torch's own errors, out of memory and a refused backend among them
    OSError,
    ImportError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
    StopIteration,
)
"""Exceptions by which a vendor's or a peer's code refuses a problem; each becomes a reason."""


_served: set[tuple[Config, Problem]] = set()
"""Tried problems whose run passed in this process; not repeated for a new scale or buffer."""
_MAX_SERVED = 4096
"""Problems in a larger set are forgotten."""


#: Packages behind each fact of `installed_versions`, first found wins.
PACKAGES: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cudnn_frontend": ("nvidia-cudnn-frontend",),
    "cublas": ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
}

FLEX = "flex"
"""Compiled FlexAttention: a baseline, and PyTorch's answer for block masks."""

MEASURED_ONLY: frozenset[str] = frozenset(
    {
        *("deep_gemm", "torch_compile", "inductor", "flash3_serving", FLEX),
        *("flash4_128x128", "flash4_128x160", "flash4_192x128", "flash4_192x144"),
    }
)
"""Kernels that the runtime never calls, even when they win. They compile during a call, or hold
state that only one stream may use at a time (FlashAttention-3's metadata).
"""

ANSWERS: Mapping[str, str] = {
    **{"flash3": "flash3", "flash3_splits": "flash3", "flash4": "flash4"},
    **{"cudnn_plans": "cudnn", "cublaslt_search": "cublaslt", "flash3_unprepared": "flash3"},
}
"""Word of TUNER_ANSWERS for each kernel of a peer that the runtime may call."""

BUILDS: Mapping[str, str] = {"flash3_unprepared": "flash3_serving"}
"""Peer that a kernel is of, where its word of TUNER_ANSWERS is another peer's name."""

BESIDE_PYTORCH: frozenset[str] = MEASURED_ONLY | ANSWERS.keys()
"""Kernels that eager PyTorch never chooses by itself."""

_ATTENTION = AttentionProblem.op, AttentionBackwardProblem.op
MAX_INTEGER = 2**31 - 1
"""Largest value of a library's own parameter: what the schema of entries takes."""


def owner_of(kernel: object) -> str:
    """Word of TUNER_ANSWERS for a vendor's kernel."""
    return ANSWERS.get(str(kernel), "pytorch")


def may_answer(kernel: object) -> bool:
    """True unless TUNER_ANSWERS leaves out the owner of a vendor's kernel.

    Raises:
        ConfigError: when the variable has an unknown word.
    """
    return owner_of(kernel) in settings.answers()


class Vendor(Family):
    """A family of prebuilt kernels; subclasses name and connect them."""

    is_vendor: ClassVar[bool] = True
    offered: ClassVar[tuple[str, ...]]
    """Values of ``kernel``, in the order of the space."""
    on_request: ClassVar[tuple[str, ...]] = ()
    """Values of ``kernel`` that are not part of the space: too slow to win, or not installed on
    most machines (`found`); timed when named."""
    options: ClassVar[Mapping[str, Domain]] = {}
    """Domains of parameters that a config may have beside ``kernel``."""
    layouts: ClassVar[Mapping[str, Layout]] = {}
    """The layout of operands that each kernel of attention is fastest on."""
    takes_scale: ClassVar[bool] = True
    """False when a call has no factor of its product: it is offered with 1."""
    is_tried: ClassVar[bool] = True
    """True when a call needs a trial run; False when its library has checked the problem."""

    def __init_subclass__(cls, **options: Any) -> None:
        """The domains are what `offered`, `on_request` and `options` say, where it has kernels."""
        if hasattr(cls, "offered"):
            cls.domains = {"kernel": (*cls.offered, *cls.on_request), **cls.options}
            cls.optional = frozenset(cls.options)
        super().__init_subclass__(**options)

    def refusal(self, problem: Problem, kernel: str) -> str:
        """Reason why `kernel` does not compute `problem`; empty when it does."""
        return ""

    @abstractmethod
    def connect(self, problem: Any, kernel: str, scale: float) -> Callable[..., Any] | str:
        """`vendor_call` before it is tried; runs only where torch sees a GPU. May raise any of
        `FAILURES`.
        """

    def trial(self, problem: Problem, kernel: str) -> Problem:
        """The problem whose tensors a kernel's trial run has."""
        return problem

    def found(self) -> tuple[str, ...]:
        """Values of `on_request` that this machine has, and that are part of the space there."""
        return ()

    def connected(self, problem: Problem, config: Config, scale: float) -> Callable[..., Any] | str:
        """`connect` for a whole config, where more than its kernel counts."""
        return self.connect(problem, config["kernel"], scale)

    def environment(self) -> Mapping[str, str]:
        return installed_versions()

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        reason = self.refusal(problem, config["kernel"])
        return [reason] if reason else []

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        kernels = dict.fromkeys((*self.offered, *self.found()))
        configs = [Config(self.name, {"kernel": kernel}) for kernel in kernels]
        return [config for config in configs if not self.violations(problem, config, gpu)]

    def preferred(self, problem: Problem, kernel: str) -> Config:
        """`kernel` with its operands in the layout that it is fastest on."""
        own, params = getattr(problem, "layout", None), {"kernel": kernel}
        if own is not None and (layout := self.layouts.get(kernel, own)) != own:
            params["layout"] = layout
        return Config(self.name, params)

    def handed_over(self, problem: Problem, config: Config) -> Problem:
        layout = config.get("layout")
        return replace(problem, layout=layout) if layout else problem  # type: ignore[call-arg]

    def vendor_call(
        self, problem: Problem, config: Config, scale: float
    ) -> Callable[..., Any] | str:
        kernel = config.get("kernel")
        if problem.op != self.op or kernel not in (*self.offered, *self.on_request):
            return f"{self.name} has no kernel '{kernel}' for {problem.op}"
        if reason := self.refusal(problem, kernel):
            return reason
        try:
            import torch
        except ImportError as exc:
            return f"torch is not installed ({exc}): {extra_command('torch')}"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA GPU"
        if scale != 1.0 and not self.takes_scale:
            return f"{kernel} is offered with alpha 1, not {scale}"
        try:
            call = self.connected(problem, config, scale)
        except FAILURES as exc:
            return _sentence(kernel, exc, [])
        if isinstance(call, str) or not self.is_tried:
            return call
        problem = self.trial(problem, kernel)
        if (config, problem) in _served:
            return call
        ready = tried(call, problem, kernel, "cuda")
        if not isinstance(ready, str):
            if len(_served) >= _MAX_SERVED:
                _served.clear()
            _served.add((config, problem))
        return ready


class ListedVendor(Vendor):
    """A library that lists its own candidates on the GPU: execution plans, algorithms.

    A config with only the kernel's name is the library's default. Any other config holds the
    numbers that rebuild one candidate, and the library's `version`; another version refuses it. All
    candidates of a problem are one group, since nothing is compiled.
    """

    is_listed: ClassVar[bool] = True
    library: ClassVar[str]
    """Name of the library in `Environment.facts`."""
    identity: ClassVar[tuple[str, ...]]
    """Parameters, `version` among them, that every listed config has."""

    def __init_subclass__(cls, **options: Any) -> None:
        cls.runtime_parameters = frozenset(cls.options)
        ranges = {name: domain for name, domain in cls.options.items() if isinstance(domain, range)}
        cls.draws = {name: tuple(domain[:3]) for name, domain in ranges.items()}
        super().__init_subclass__(**options)

    @abstractmethod
    def version(self) -> int:
        """The library's version here, as one number. May raise any of `FAILURES`."""

    def environment(self) -> Mapping[str, str]:
        """As all vendors', and the version that the loaded library gives itself."""
        with contextlib.suppress(*FAILURES):
            return {**super().environment(), f"{self.library}_loaded": str(self.version())}
        return super().environment()

    @abstractmethod
    def rebuilt(self, problem: Any, config: Config, scale: float) -> Callable[..., Any] | str:
        """`connected` of a config that this version of the library listed, or of its first choice.
        May raise any of `FAILURES`.
        """

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        return super().supports(problem, gpu) or self.refusal(problem, self.offered[0])

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        if len(config.params) == 1:
            return []
        absent = [name for name in self.identity if name not in config.params]
        return [f"parameter {name} is missing" for name in absent]

    def connect(self, problem: Any, kernel: str, scale: float) -> Callable[..., Any] | str:
        return self.connected(problem, Config(self.name, {"kernel": kernel}), scale)

    def connected(self, problem: Problem, config: Config, scale: float) -> Callable[..., Any] | str:
        if faults := self.malformed(config):  # a store's text goes no further
            return "; ".join(faults)
        listed, here = config.get("version"), self.version()
        if listed not in (None, here):
            return f"{config['kernel']} of version {listed}, and the library's here is {here}"
        return self.rebuilt(problem, config, scale)


class PreparedCall(ABC):
    """A vendor's call with a preparation that depends on the contents of its inputs.

    A program prepares once for many calls, for instance a mask from tables. The time of a call
    excludes the preparation.
    """

    @abstractmethod
    def prepared(self, *inputs: Any) -> Callable[..., Any]:
        """The call for inputs with these contents, which must not change until it was made."""

    def __call__(self, *inputs: Any) -> Any:
        return self.prepared(*inputs)(*inputs)


def off_rows(problem: Problem, strides: Strides | None = None) -> str:
    """Reason why no fused kernel of a vendor reads attention's tensors where they lie; else empty.

    cuDNN's kernel reads a bias in vectors, whatever its strides are. The problem's own are those of
    the run that tries a kernel.

    Args:
        problem: problem of attention or of its gradients. All others are read.
        strides: strides of operands that differ from the problem's.
    """
    if problem.op not in _ATTENTION:
        return ""
    laid = [(operand, operand.strides) for operand in problem.inputs if operand.name == "bias"]
    laid += [(o, strides[o.name]) for o in problem.inputs if strides and o.name in strides]
    for operand, own in laid:
        size = DTYPE_BYTES[operand.dtype]
        *rows, columns = [step if n > 1 else 0 for n, step in zip(operand.shape, own, strict=True)]
        if columns > 1 or any(step * size % TMA_ALIGNMENT_BYTES for step in rows):
            allowed = f"1 along rows, else multiples of {TMA_ALIGNMENT_BYTES} bytes"
            return f"strides {own} of {operand.name} (allowed: {allowed})"
    return ""


def tried(
    call: Callable[..., Any], problem: Problem, kernel: str, device: str
) -> Callable[..., Any] | str:
    """`call` after one run on tensors like the problem's, or the reason that it refused them.

    The run finds unsupported problems before the timing, and lets the backend plan and load outside
    a graph capture.
    """
    import torch

    def empty(operand: Operand) -> Any:
        dtype = getattr(torch, operand.dtype)
        return torch.empty_strided(operand.shape, operand.strides, dtype=dtype, device=device)

    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        try:
            with torch.no_grad():
                out = call(*(empty(o).zero_() for o in problem.inputs))
            if device == "cuda":
                torch.cuda.synchronize()
        except FAILURES as exc:
            return _sentence(kernel, exc, [str(warning.message) for warning in notes])
    outs = out if isinstance(out, tuple) else (out,)
    came = ", ".join(f"{str(o.dtype).removeprefix('torch.')} {tuple(o.shape)}" for o in outs)
    due = ", ".join(f"{o.dtype} {o.shape}" for o in problem.outputs)
    return call if came == due else f"{kernel} returned {came}, not {due}"


def compiled(function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """`function` of one problem's tensors as torch.compile makes it.

    Compiled when it is first called, which `tried` does outside of any timing. It gets no CUDA
    graphs of its own (``max-autotune`` would replay one inside ours): its calls are captured like
    all others'. Code that cannot be compiled as a whole is an error, never partly eager. Its code
    is copied, because Dynamo compiles one code eight times (`recompile_limit`) and then calls the
    Python, and several problems' functions share one.

    Args:
        function: function of torch tensors.
        mode: mode of torch.compile; None: the default.
    """
    import torch

    code = function.__code__.replace()
    own = types.FunctionType(
        code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    result: Callable[..., Any] = torch.compile(own, mode=mode, dynamic=False, fullgraph=True)
    return result


def allocated(
    problem: Problem, size: int, run: Callable[[Sequence[Any], Any, Any], None]
) -> Callable[..., Any]:
    """call(*inputs) -> output, newly allocated with a workspace of `size` bytes for each call."""
    import torch

    shape, strides = problem.output.shape, problem.output.strides
    dtype = getattr(torch, problem.output.dtype)

    def call(*inputs: Any) -> Any:
        device = inputs[0].device
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        run(inputs, out, torch.empty(size, dtype=torch.uint8, device=device))
        return out

    return call


def rated_us(rates: Sequence[float], problem: Any, gpu: Gpu) -> float:
    """Estimate of an attention kernel: a fixed part plus the work at the rate of a large problem.

    Args:
        rates: microseconds of a tiny call, then TFLOP/s of a large one on the default GPU: full and
            causal at D <= 64, full and causal above.
        problem: attention or its gradients.
        gpu: GPU that it runs on.
    """
    start_us, *tflops = rates
    rate = tflops[2 * (problem.head_dim > 64) + problem.is_causal]
    rate *= gpu.peak_tflops / DEFAULT_GPU.peak_tflops
    return float(start_us + max(problem.flops / rate / 1e6, problem.bytes / gpu.memory_gbs / 1e3))


MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
"""Mode of torch.compile that searches longest."""


def stream_of(device: Any) -> int:
    """The stream that torch enqueues on now; the only one on a CPU, for tests."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def _sentence(kernel: str, exc: BaseException, messages: Sequence[str]) -> str:
    """One line: the error, and the reasons that torch gives as warnings."""
    texts = [str(exc) or type(exc).__name__, *messages]
    lines = [text.partition("(Triggered internally")[0].strip() for text in texts]
    distinct = dict.fromkeys(_beginning(line) for line in lines if line)
    return f"{kernel} refuses: {'; '.join(distinct)}"[:1000]


def _beginning(text: str) -> str:
    """The first line, and the next one where it only announces that."""
    first, *more = text.splitlines()
    return f"{first} {more[0]}" if first.endswith(":") and more else first


@cache
def installed_versions() -> dict[str, str]:
    """Versions of the packages that vendor kernels come from: torch, cudnn, cublas.

    Read from the packages' metadata, so that `tuner lookup` can compare without importing torch.
    """
    versions: dict[str, str] = {}
    for fact, names in PACKAGES.items():
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions.setdefault(fact, version_of(name))
    return versions
