"""What the vendors' families share: one parameter ``kernel``, and calls through torch that are
tried once before they are handed out.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from tuner.base.install import extra_command
from tuner.config import Config
from tuner.families.base import Domain, Family
from tuner.hardware import Gpu
from tuner.problem import Operand, Problem

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
"""What a vendor's or a peer's code raises when it cannot serve: each becomes a reason."""


_served: set[tuple[str, Problem]] = set()
"""What ran once in this process: not tried again for each new scale and each new buffer."""


#: Packages behind each fact of `installed_versions`, first found wins.
PACKAGES: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cublas": ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
}


class Vendor(Family):
    """A family of ready kernels. Subclasses name them and connect them."""

    is_vendor: ClassVar[bool] = True
    offered: ClassVar[tuple[str, ...]]
    """Values of ``kernel``, in the order of the space."""
    on_request: ClassVar[tuple[str, ...]] = ()
    """Values of ``kernel`` that are no part of the space: too slow to win, timed when named."""
    options: ClassVar[Mapping[str, Domain]] = {}
    """Domains of parameters that a config may have beside ``kernel``."""

    def __init_subclass__(cls, **options: Any) -> None:
        """The domains are what `offered`, `on_request` and `options` say."""
        cls.domains = {"kernel": (*cls.offered, *cls.on_request), **cls.options}
        cls.optional = frozenset(cls.options)
        super().__init_subclass__(**options)

    def refusal(self, problem: Problem, kernel: str) -> str:
        """Why `kernel` would compute something else than `problem`; empty when it would not."""
        return ""

    @abstractmethod
    def connect(self, problem: Any, kernel: str, scale: float) -> Callable[..., Any] | str:
        """`vendor_call` before it is tried; runs only where torch sees a GPU. May raise any of
        `FAILURES`.
        """

    def environment(self) -> Mapping[str, str]:
        return installed_versions()

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        reason = self.refusal(problem, config["kernel"])
        return [reason] if reason else []

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        configs = [Config(self.name, {"kernel": kernel}) for kernel in self.offered]
        return [config for config in configs if not self.violations(problem, config, gpu)]

    def preferred(self, problem: Problem, kernel: str) -> Config:
        """`kernel` with its operands in the layout that it is fastest on."""
        return Config(self.name, {"kernel": kernel})

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
        try:
            call = self.connect(problem, kernel, scale)
        except FAILURES as exc:
            return _sentence(kernel, exc, [])
        if isinstance(call, str) or (kernel, problem) in _served:
            return call
        made = tried(call, problem, kernel, "cuda")
        if not isinstance(made, str):
            _served.add((kernel, problem))
        return made


def tried(
    call: Callable[..., Any], problem: Problem, kernel: str, device: str
) -> Callable[..., Any] | str:
    """`call` after one run on tensors like the problem's, or the reason that it refused them.

    Says before timing starts what a backend does not serve, and lets it plan and load outside of
    any graph capture.
    """
    import torch

    def empty(operand: Operand) -> Any:
        dtype = getattr(torch, operand.dtype)
        return torch.empty_strided(operand.shape, operand.strides, dtype=dtype, device=device)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with torch.no_grad():
                out = call(*(empty(o).zero_() for o in problem.operands if not o.is_output))
            if device == "cuda":
                torch.cuda.synchronize()
        except FAILURES as exc:
            return _sentence(kernel, exc, [str(warning.message) for warning in said])
    shape, dtype = tuple(out.shape), str(out.dtype).removeprefix("torch.")
    if (shape, dtype) != (problem.output.shape, problem.output.dtype):
        return (
            f"{kernel} returned {dtype} {shape}, not {problem.output.dtype} {problem.output.shape}"
        )
    return call


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one problem's tensors as torch.compile makes it when it searches longest.

    Compiled when it is first called, which `tried` does outside of any timing. It gets no CUDA
    graphs of its own (``max-autotune`` would replay one inside ours): its calls are captured like
    all others'. What cannot be compiled as a whole is an error, never partly eager. The problems
    before are forgotten: their functions are of one code, of which Dynamo compiles eight
    (`recompile_limit`) and then calls the Python.
    """
    import torch

    torch.compiler.reset()
    made: Callable[..., Any] = torch.compile(
        function, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True
    )
    return made


def _sentence(kernel: str, exc: BaseException, said: Sequence[str]) -> str:
    """One line: the error, and the reasons that torch gives as warnings."""
    texts = [str(exc) or type(exc).__name__, *said]
    lines = [text.partition("(Triggered internally")[0].strip() for text in texts]
    distinct = dict.fromkeys(_beginning(line) for line in lines if line)
    return f"{kernel} refuses: {'; '.join(distinct)}"[:1000]


def _beginning(text: str) -> str:
    """The first line, and the next one where it only announces that."""
    first, *others = text.splitlines()
    return f"{first} {others[0]}" if first.endswith(":") and others else first


@cache
def installed_versions() -> dict[str, str]:
    """Versions of the packages that vendor kernels come from: torch, cudnn, cublas.

    Read from the packages' metadata, so that `tuner lookup` can compare without importing torch.
    """
    found: dict[str, str] = {}
    for fact, names in PACKAGES.items():
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(fact, importlib.metadata.version(name))
    return found
