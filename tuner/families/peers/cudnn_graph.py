"""Attention as a graph of cuDNN's Python frontend, and its execution plans.

A plan's name rebuilds it on any graph of the problem. It has the engine's number, the values of its
knobs, and which of two operations the graph has. A heuristic's order changes with the version.
Tested with nvidia-cudnn-frontend 1.32.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.problem import E4M3, AttentionProblem, Operand

DATA_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT", E4M3: "FP8_E4M3"}
HEURISTICS = ("A", "B", "FALLBACK")
IMPLEMENTATIONS = {False: "COMPOSITE", True: "UNIFIED"}
"""cudnn.attention_implementation by whether attention is one operation of cuDNN's or several."""
#: cudnn.knob_type, in lower case.
KNOBS = (
    *("swizzle", "tile_size", "edge", "multiply", "split_k_buf", "tilek", "stages"),
    *("reduction_mode", "split_k_slc", "idx_mode", "specfilt", "kernel_cfg", "workspace"),
    *("tile_cga_m", "tile_cga_n", "block_size", "occupancy", "array_size_per_thread"),
    *("split_cols", "tile_rows", "tile_cols", "load_size", "cta_count", "stream_k"),
    *("split_p_slc", "tile_m", "tile_n", "warp_spec_cfg", "swap_ab", "input_tma_enable"),
    *("output_tma_enable", "tile_cga", "sched_policy", "pack_gqa", "split_kv"),
    *("pipeline_arch", "mma_tile_m", "mma_tile_n", "mma_tile_k", "cta_group"),
    *("warps_m", "warps_n"),
)
_thread = threading.local()


@dataclass(frozen=True)
class PlanName:
    """The numbers that rebuild a plan."""

    engine: int
    knobs: tuple[tuple[str, int], ...]
    is_unified: bool


@dataclass
class CudnnGraph:
    """A graph of one problem and scale, not yet planned."""

    cudnn: Any
    problem: AttentionProblem
    scale: float
    implementation: str
    """A name of cudnn.attention_implementation."""
    handle: Any
    graph: Any = field(init=False)

    def __post_init__(self) -> None:
        cudnn = self.cudnn
        self.graph = cudnn.pygraph(
            io_data_type=self.kind(self.problem.dtype),
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self.handle,
        )
        self.compose()
        self.graph.validate()
        self.graph.build_operation_graph()

    def kind(self, dtype: str) -> Any:
        """CuDNN's name of a type."""
        return getattr(self.cudnn.data_type, DATA_TYPES[dtype])

    def compose(self) -> None:
        """Add the operands, each by its place from 1, and the operation."""
        *inputs, last = self.problem.operands
        query, key, value, *bias = (self.tensor(o, uid) for uid, o in enumerate(inputs, 1))
        options = {"bias": bias[0]} if bias else {}
        out, _ = self.graph.sdpa(
            name="attention",
            q=query,
            k=key,
            v=value,
            attn_scale=self.scale,
            generate_stats=False,
            implementation=getattr(self.cudnn.attention_implementation, self.implementation),
            **options,
            **self._mask(),
        )
        self.deliver(out, last, len(inputs) + 1)

    def tensor(self, operand: Operand, uid: int) -> Any:
        """An operand of the graph."""
        return self.graph.tensor(
            dim=list(operand.shape),
            stride=list(operand.strides),
            data_type=self.kind(operand.dtype),
            name=operand.name,
            uid=uid,
        )

    def deliver(self, tensor: Any, operand: Operand, uid: int) -> None:
        """Have a result written to an operand."""
        tensor.set_output(True).set_dim(list(operand.shape)).set_stride(list(operand.strides))
        tensor.set_data_type(self.kind(operand.dtype)).set_uid(uid)

    def _mask(self) -> dict[str, Any]:
        """The band along the diagonal from the top left; its left side counts the diagonal."""
        problem = self.problem
        right = 0 if problem.is_causal else problem.window_right
        mask = {} if right < 0 else {"diagonal_band_right_bound": right}
        if problem.window_left >= 0:
            mask["diagonal_band_left_bound"] = problem.window_left + 1
        if mask:
            mask["diagonal_alignment"] = self.cudnn.diagonal_alignment.TOP_LEFT
        return mask

    def planned(self, heuristic: str) -> list[PlanName]:
        """The plans of a heuristic, best first; those with unknown knobs or values are left out.
        Asked for once a graph.
        """
        graph = self.graph
        graph.create_execution_plans([getattr(self.cudnn.heur_mode, heuristic)])
        plans = []
        for index in range(graph.get_execution_plan_count()):
            engine, values = graph.get_engine_and_knobs_at_index(index)
            knobs = {kind.name.lower(): int(value) for kind, value in values.items()}
            if engine >= 0 and knobs.keys() <= set(KNOBS) and min(knobs.values(), default=0) >= 0:
                is_unified = self.implementation == IMPLEMENTATIONS[True]
                plans.append(PlanName(int(engine), tuple(sorted(knobs.items())), is_unified))
        return plans

    def built(self, engine: int, knobs: Mapping[str, int]) -> CudnnPlan:
        """The plan of an engine and its knobs, compiled."""
        kinds = self.cudnn.knob_type
        values = {getattr(kinds, name.upper()): value for name, value in knobs.items()}
        self.graph.create_execution_plan(engine, values)
        return self._plan(self.graph.get_execution_plan_count() - 1)

    def first(self) -> CudnnPlan:
        """The first plan of cuDNN's own heuristic that can be built."""
        self.graph.create_execution_plans([self.cudnn.heur_mode.A])
        refused: Exception = LookupError("cuDNN has no plan")
        for index in range(self.graph.get_execution_plan_count()):
            try:
                return self._plan(index)
            except (RuntimeError, self.cudnn.cudnnGraphNotSupportedError) as exc:
                refused = exc
        raise refused

    def _plan(self, index: int) -> CudnnPlan:
        self.graph.build_plan_at_index(index)
        size = int(self.graph.get_workspace_size_plan_at_index(index))
        return CudnnPlan(self.cudnn, self.graph, index, size)


@dataclass
class CudnnPlan:
    """A compiled plan."""

    cudnn: Any
    graph: Any
    index: int
    workspace_bytes: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def execute(self, tensors: Mapping[int, Any], workspace: Any, handle: Any) -> None:
        """Enqueue it on the handle's stream, the operands by their place from 1.

        Raises:
            RuntimeError: when cuDNN refuses it.
        """
        try:
            with self._lock:  # the frontend keeps the addresses of a call in the graph
                self.graph.execute_plan_at_index(tensors, workspace, self.index, handle)
        except self.cudnn.cudnnGraphNotSupportedError as exc:
            raise RuntimeError(str(exc)) from exc


def names(cudnn: Any, problem: AttentionProblem, scale: float, handle: Any) -> list[PlanName]:
    """Every plan of every heuristic, each once, in the order of `HEURISTICS`.

    Raises:
        Exception: cuDNN's, when none has any.
    """
    plans: dict[PlanName, None] = {}
    refused: Exception | None = None
    for heuristic in HEURISTICS:
        for implementation in IMPLEMENTATIONS.values():
            try:
                graph = CudnnGraph(cudnn, problem, scale, implementation, handle)
                plans.update(dict.fromkeys(graph.planned(heuristic)))
            except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as exc:
                refused = refused or exc
    if refused and not plans:
        raise refused
    return list(plans)


def handle_of(cudnn: Any, device: int, stream: int) -> Any:
    """This thread's handle of a device, the current one, on a stream."""
    handles: dict[int, Any] = _thread.__dict__.setdefault("handles", {})
    if device not in handles:
        handles[device] = cudnn.create_handle()
    cudnn.set_stream(handles[device], stream)
    return handles[device]
