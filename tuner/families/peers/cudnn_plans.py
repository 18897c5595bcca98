"""Every execution plan of cuDNN for attention, from the heuristics A, B and fallback. PyTorch takes
the first plan without timing.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tuner.base.install import install_command
from tuner.config import Config, Value
from tuner.families.base import Domain
from tuner.families.peers import (
    MAX_INTEGER,
    ListedVendor,
    allocated,
    cudnn_graph,
    off_rows,
    stream_of,
)
from tuner.families.peers.cudnn_graph import KNOBS, CudnnGraph
from tuner.families.peers.sdpa import VendorSdpa
from tuner.hardware import Gpu
from tuner.problem import E4M3, AttentionProblem, Problem

KERNEL = "cudnn_plans"
FRONTEND = "nvidia-cudnn-frontend"
_NEEDED = ("get_engine_and_knobs_at_index", "create_execution_plan", "execute_plan_at_index")


class VendorCudnnPlans(ListedVendor):
    """``kernel``: cudnn_plans. `engine`, the knobs that it has and `is_unified` rebuild a plan;
    `version` is cuDNN's. Needs nvidia-cudnn-frontend. Each call allocates its workspace from torch.
    """

    name: ClassVar[str] = "vendor_cudnn_plans"
    op: ClassVar[str] = AttentionProblem.op
    offered: ClassVar[tuple[str, ...]] = (KERNEL,)
    library: ClassVar[str] = "cudnn"
    takes_wide_heads: ClassVar[bool] = True
    identity: ClassVar[tuple[str, ...]] = ("engine", "is_unified", "version")
    options: ClassVar[Mapping[str, Domain]] = {
        "engine": range(MAX_INTEGER + 1),
        "is_unified": (False, True),
        "version": range(MAX_INTEGER + 1),
        **{name: range(MAX_INTEGER + 1) for name in KNOBS},
    }

    def refusal(self, problem: Problem, kernel: str) -> str:
        if not isinstance(problem, AttentionProblem):
            return ""
        lacking = (
            (f"descale factors of {E4M3} a head", problem.dtype == E4M3),
            ("variable lengths", problem.is_varlen),
            ("paged cache", problem.is_paged),
            ("soft cap", problem.softcap > 0),
            ("block-sparse mask", bool(problem.block_mask)),
            (
                "sliding window of more queries than keys",
                problem.is_windowed and problem.seqlen_q > problem.seqlen_kv,
            ),
        )
        if absent := next((what for what, is_asked in lacking if is_asked), ""):
            return f"{kernel} has no {absent}"
        return f"{kernel} takes no {reason}" if (reason := off_rows(problem)) else ""

    def lacks(self) -> str:
        if importlib.util.find_spec("cudnn") is None:
            return f"{FRONTEND} is not installed: {install_command(FRONTEND)}"
        return ""

    def version(self) -> int:
        return int(frontend().backend_version())

    def listing(self, problem: Problem, max_workspace: int | None) -> Sequence[Config]:
        if not isinstance(problem, AttentionProblem):
            return []
        cudnn, version = frontend(), self.version()
        names = cudnn_graph.names(cudnn, problem, 1 / math.sqrt(problem.head_dim), _handle(cudnn))
        plain: dict[str, Value] = {"kernel": KERNEL, "version": version}
        return [
            Config(
                self.name,
                {**plain, "engine": plan.engine, "is_unified": plan.is_unified, **dict(plan.knobs)},
            )
            for plan in names
        ]

    def rebuilt(
        self, problem: AttentionProblem, config: Config, scale: float
    ) -> Callable[..., Any] | str:
        cudnn = frontend()
        handle = _handle(cudnn)
        try:
            if "engine" not in config.params:
                plan = CudnnGraph(cudnn, problem, scale, "AUTO", handle).first()
            else:
                kind = cudnn_graph.IMPLEMENTATIONS[config["is_unified"]]
                knobs = {name: config[name] for name in KNOBS if name in config.params}
                plan = CudnnGraph(cudnn, problem, scale, kind, handle).built(
                    config["engine"], knobs
                )
        except cudnn.cudnnGraphNotSupportedError as exc:  # of no class that others have
            return f"{KERNEL} refuses: {exc}"
        return called(problem, plan)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """As PyTorch's choice among them."""
        return VendorSdpa().predict_us(problem, Config("vendor_sdpa", {"kernel": "cudnn"}), gpu)


def frontend() -> Any:
    """CuDNN's Python frontend.

    Raises:
        ImportError: when it is not installed, or too old to rebuild a plan.
    """
    try:
        cudnn = importlib.import_module("cudnn")
    except ImportError as exc:
        raise ImportError(f"{exc}: {install_command(FRONTEND)}") from exc
    if absent := [name for name in _NEEDED if not hasattr(cudnn.pygraph, name)]:
        raise ImportError(f"nvidia-cudnn-frontend is too old: it has no {absent[0]}")
    return cudnn


def _handle(cudnn: Any) -> Any:
    import torch

    device = torch.cuda.current_device()
    return cudnn_graph.handle_of(cudnn, device, stream_of(torch.device("cuda", device)))


def called(problem: AttentionProblem, plan: cudnn_graph.CudnnPlan) -> Callable[..., Any]:
    """call(query, key, value[, bias]) -> out."""

    def run(inputs: Sequence[Any], out: Any, workspace: Any) -> None:
        device = out.device
        handle = cudnn_graph.handle_of(plan.cudnn, device.index or 0, stream_of(device))
        plan.execute(dict(enumerate((*inputs, out), 1)), workspace, handle)

    return allocated(problem, max(1, plan.workspace_bytes), run)
