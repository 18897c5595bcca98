"""Tensors of a product, and its ways: own kernels, PyTorch's, cuBLASLt's algorithms, DeepGEMM."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from math import ceil, inf
from typing import Any

from benchmarks import harness
from benchmarks.moe_peers import deep_gemm
from benchmarks.own_plans import built_artifacts, own_plan, plans_of
from tuner.config import Config
from tuner.families import families
from tuner.families.block_scaled_gemm.rates_fit import kernel_name
from tuner.problem import DTYPE_BYTES, SCALE_BLOCK, GemmProblem

Call = Callable[[int], Any]
Way = tuple[str, Callable[[], Call]]
"""Name of a contender, and what makes its call by the copy of the weights."""

ROTATED_BYTES, MAX_COPIES = 128 << 20, 16
"""Weights of all copies: over twice the L2."""
CHECKED_ROWS, CHECKED_COLUMNS = 256, 512
"""First rows and columns that are compared with fp64."""
ALGORITHMS = 16
"""Algorithms of cuBLASLt that are timed, the first of its list."""
BAND = 8
"""Tiles of the other side that are walked together when a kernel is launched once more."""
OUTPUT_FACTOR = 4.0


class Tensors:
    """Rows, weights and factors of a product.

    Args:
        problem: in fp16 or bf16, or in e4m3 with factors of operands, of rows, or of blocks.
    """

    def __init__(self, problem: GemmProblem) -> None:
        import torch

        m, n, k = problem.m, problem.n, problem.k
        self.problem = problem
        width = DTYPE_BYTES[problem.dtype]
        self.copies = min(MAX_COPIES, ceil(ROTATED_BYTES / (width * n * k)) + 1)
        rows = torch.randn(m, k, device="cuda")
        rows = rows.to(getattr(torch, problem.dtype)) if width == 2 else rows.bfloat16()
        self.factors: list[Any] = []
        weight_factors: list[Any] = [None] * self.copies
        if problem.scales == "block":
            from tuner.runtime.products import block_scaled

            rows, scale_a = block_scaled.quantised(rows)
            self.factors = [scale_a]
            shape = ceil(n / SCALE_BLOCK), ceil(k / SCALE_BLOCK)
            weight_factors = [
                (torch.rand(shape, device="cuda") + 0.5) * (k**-0.5 / 100)
                for _ in range(self.copies)
            ]
        elif width == 1:
            sides = (m, n) if problem.scales == "row" else (1, 1)
            each = k**-0.25 / 64  # sums of about one
            self.factors = [
                (torch.rand(shape, device="cuda") + 0.5) * each
                for shape in ((sides[0], 1), (1, sides[1]))
            ]
            if problem.has_output_scale:
                self.factors.append(torch.full((1,), OUTPUT_FACTOR, device="cuda"))
            rows = _elements(m, k)
        self.source, self.rows = rows, rows.clone()
        deviation = k**-0.5 if width == 2 else 100.0
        self.weights = [
            (_elements(n, k, deviation, self.rows.dtype), factors) for factors in weight_factors
        ]
        self.wanted = self._exact()

    def before(self, _: int) -> Any:
        """Write the rows."""
        import torch

        words = self.rows.view(torch.int16)
        return torch.bitwise_or(self.source.view(torch.int16), 0, out=words)

    def error(self, out: Any) -> float:
        """Relative error of the first rows and columns of the first copy's product."""
        rows, columns = self.wanted.shape
        part = out.reshape(self.problem.m, self.problem.n)[:rows, :columns]
        return harness.distance(part, self.wanted)

    def _exact(self) -> Any:
        problem = self.problem
        rows, columns = min(problem.m, CHECKED_ROWS), min(problem.n, CHECKED_COLUMNS)
        weight, scale_b = self.weights[0]
        left, right = self.rows[:rows].double(), weight[:columns].double()
        if problem.scales == "block":

            def wide(factors: Any) -> Any:
                return factors.double().repeat_interleave(SCALE_BLOCK, 1)[:, : problem.k]

            of_columns = scale_b.repeat_interleave(SCALE_BLOCK, 0)[:columns]
            left, right = left * wide(self.factors[0][:rows]), right * wide(of_columns)
        elif self.factors:
            scale_a, scale_b = self.factors[:2]
            left, right = left * scale_a[:rows], right * scale_b[:, :columns].t()
        return left @ right.t() * (OUTPUT_FACTOR if problem.has_output_scale else 1.0)

    def operands(self, i: int) -> tuple[Any, ...]:
        """Operands of a copy, in the problem's order."""
        weight, scale_b = self.weights[i]
        factors = self.factors if scale_b is None else [self.factors[0], scale_b.t()]
        return self.rows, weight.t(), *factors

    def planned(self, plan: Any) -> Call:
        """The call of an own kernel's plan."""
        return lambda i: plan.run_uncounted(*self.operands(i))

    def own(self, config: Config, artifacts: Any) -> Call:
        """A built kernel's call.

        Raises:
            RuntimeError: when it has no plan.
        """
        plan = own_plan(self.problem, config, artifacts)
        if isinstance(plan, str):
            raise RuntimeError(plan)
        return self.planned(plan)


def _elements(rows: int, columns: int, deviation: float = 64.0, dtype: Any = None) -> Any:
    """Normal elements, e4m3 ones made in parts."""
    import torch

    drawn = torch.empty(rows, columns, dtype=dtype or torch.float8_e4m3fn, device="cuda")
    for part in drawn.split(8192):
        normal = torch.randn(part.shape, device="cuda", dtype=torch.bfloat16).mul_(deviation)
        part.copy_(normal if part.element_size() == 2 else normal.clamp_(-448, 448))
    return drawn


def rule_ways(tensors: Tensors, *, with_near: bool, unproven: bool) -> Iterator[Way]:
    """Kernels of the rule of factors of blocks that are proven here, in the rule's order.

    Args:
        tensors: tensors of the product.
        with_near: also kernels behind the first that are expected near.
        unproven: also kernels without a proof.
    """
    from tuner.families.block_scaled_gemm import rule
    from tuner.runtime.call import devices

    selection = rule.select(tensors.problem, devices.gpu_of(0))
    for config, plan in plans_of(tensors.problem, selection, unproven=unproven):
        yield f"tuner {kernel_name(config)}", lambda plan=plan: tensors.planned(plan)  # type: ignore[misc]
        if not with_near:
            return


def ranked(name: str, problem: GemmProblem, gpu: Any) -> list[Config]:
    """A family's kernels by its estimates, one config each."""
    family = families()[name]
    kernels: dict[str, Config] = {}
    space = family.space(problem, gpu)
    for config in sorted(space, key=lambda one: family.predict_us(problem, one, gpu)):
        kernels.setdefault(family.compile_digest(config), config)
    return list(kernels.values())


def built_ways(
    tensors: Tensors, names: Sequence[str], most: int, near: float = inf
) -> Iterator[Way]:
    """Built kernels, a family after the other, in the order of estimates.

    Args:
        tensors: tensors of the product.
        names: families.
        most: most kernels of a family.
        near: longest expected time, over the shortest; then also with `BAND` tiles together.
    """
    from tuner.runtime.call import devices

    problem, gpu = tensors.problem, devices.gpu_of(0)
    for family in (families()[name] for name in names):
        if family.supports(problem, gpu):
            continue
        configs, count = ranked(family.name, problem, gpu), 0
        limit = near * family.predict_us(problem, configs[0], gpu)
        for config in configs:
            if count == most or family.predict_us(problem, config, gpu) > limit:
                break
            artifacts = built_artifacts(family.kernels(problem, config))
            if isinstance(artifacts, str):
                continue
            count += 1
            banded = Config(family.name, {**config.params, "max_swizzle_size": BAND})
            is_banded = near < inf and not family.violations(problem, banded, gpu)
            for one in dict.fromkeys([config, *([banded] if is_banded else [])]):
                yield name_of(one), lambda c=one, a=artifacts: tensors.own(c, a)  # type: ignore[misc]


def name_of(config: Config) -> str:
    """Family and parameters of a kernel, short."""
    left = ("stages", "raster_order", "pdl", "epilogue_schedule")
    params = sorted(item for item in config.params.items() if item[0] not in left)
    texts = (f"{name}={one if isinstance(one, str) else int(one)}" for name, one in params)
    return f"tuner {config.family} {','.join(texts)}"


def torch_ways(tensors: Tensors) -> Iterator[Way]:
    """PyTorch's choice, and DeepGEMM for factors of blocks."""
    import torch
    from torch.nn import functional

    problem, rows, factors = tensors.problem, tensors.rows, tensors.factors

    def scaled(i: int) -> Any:
        kinds, (weight, scale_b) = functional.ScalingType, tensors.weights[i]
        scale_a = factors[0]
        if len(rows) == 1:  # cuBLASLt's factors lie side by side along the rows
            scale_a = scale_a.contiguous().as_strided(scale_a.shape, (1, 1))
        sides = (scale_a, kinds.BlockWise1x128), (scale_b.t(), kinds.BlockWise128x128)
        return functional.scaled_mm(rows, weight.t(), *sides[0], *sides[1])

    def deep(i: int) -> Any:
        out = torch.empty(problem.m, problem.n, dtype=torch.bfloat16, device=rows.device)
        deep_gemm().fp8_gemm_nt((rows, factors[0]), tensors.weights[i], out)
        return out

    def plain(i: int) -> Any:
        return torch.mm(rows, tensors.weights[i][0].t())

    def scaled_by_rows(i: int) -> Any:
        # On CUDA, PyTorch 2.11 leaves `scale_result` out: the output's factor is one of the rows'.
        left = factors[0] * factors[2] if problem.has_output_scale else factors[0]
        options = {"out_dtype": getattr(torch, problem.dtype_d)}
        options["use_fast_accum"] = problem.fast_accum
        return torch._scaled_mm(rows, tensors.weights[i][0].t(), left, factors[1], **options)

    if problem.scales != "block":
        yield "pytorch", lambda: scaled_by_rows if factors else plain
        return
    yield "pytorch", lambda: scaled
    if deep_gemm() is not None:
        yield "deep_gemm", lambda: deep


def table_ways(tensors: Tensors) -> Iterator[Way]:
    """Triton's kernel of vLLM, which looks up its table's entry; none where vLLM is not installed.

    Factors of its rows lie side by side along K.
    """
    import torch

    if importlib.util.find_spec("vllm") is None:
        return

    def make() -> Call:
        from vllm.model_executor.layers.quantization.utils import fp8_utils

        factors = tensors.factors[0].contiguous()

        def run(i: int) -> Any:
            weight, scale = tensors.weights[i]
            return fp8_utils.w8a8_triton_block_scaled_mm(
                tensors.rows, weight, factors, scale, [SCALE_BLOCK] * 2, torch.bfloat16
            )

        return run

    yield "vllm", make


def algorithm_ways(tensors: Tensors, count: int = ALGORITHMS) -> Iterator[Way]:
    """Algorithms that cuBLASLt's heuristic lists first, where it takes the product."""
    from tuner.runtime.call import devices

    family = families()["vendor_cublaslt_search"]
    if family.supports(tensors.problem, devices.gpu_of(0)):
        return
    flat = [factor.view(-1) for factor in tensors.factors]
    for index, config in enumerate(family.listing(tensors.problem, None)[:count]):
        call = family.vendor_call(tensors.problem, config, 1.0)
        if not isinstance(call, str):

            def run(i: int, call: Any = call) -> Any:
                weight = tensors.weights[i][0].t().unsqueeze(0)
                return call(tensors.rows.unsqueeze(0), weight, *flat)

            yield f"cublaslt {index}", lambda run=run: run  # type: ignore[misc]
