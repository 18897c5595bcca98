"""cuDNN's plans of attention in e4m3, which take one factor a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness import Contender, first_line
from tuner.families.peers import FAILURES, cudnn_graph, cudnn_plans, stream_of
from tuner.problem import E4M3, AttentionProblem, Operand

NAMES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
"""cuDNN's factors, in the order of their operands behind queries, keys and values."""
SCORES = 256.0
"""cuDNN's factor of probabilities before they are rounded to e4m3: up to 1, the largest is 448."""


@dataclass
class Fp8Graph(cudnn_graph.CudnnGraph):
    """Attention of e4m3 with cuDNN's factors; its output is e4m3, on Hopper the only one."""

    def compose(self) -> None:
        query, key, value = (self.tensor(one, i) for i, one in enumerate(self.inputs[:3], 1))
        factors = {one.name: self.tensor(one, i) for i, one in enumerate(self.inputs[3:], 4)}
        out, _, *largest = self.graph.sdpa_fp8(
            q=query,
            k=key,
            v=value,
            **factors,
            attn_scale=self.scale,
            use_causal_mask=self.problem.is_causal,
            generate_stats=False,
            name="attention",
        )
        outputs = zip((out, *largest), self.outputs, strict=True)
        for uid, (tensor, operand) in enumerate(outputs, len(self.inputs) + 1):
            self.deliver(tensor, operand, uid)

    @property
    def inputs(self) -> list[Operand]:
        """Queries, keys, values, and a number for each factor."""
        return [*self.problem.operands[:3], *map(scalar, NAMES)]

    @property
    def outputs(self) -> list[Operand]:
        """The output, and the largest score and element of it."""
        out = replace(self.problem.output, dtype=E4M3)
        return [out, scalar("amax_s"), scalar("amax_o")]


def scalar(name: str) -> Operand:
    """One fp32 number as cuDNN has it."""
    return Operand(name, (1, 1, 1, 1), (1, 1, 1, 1), "float32")


def plans_of(
    problem: AttentionProblem,
    tensors: Sequence[Any],
    scale: float,
    factor: float,
    grown: float,
    failed: dict[str, str],
) -> list[Contender]:
    """A call of each plan that cuDNN can build; why others cannot goes to `failed`.

    Args:
        problem: problem to compute.
        tensors: queries, keys and values.
        scale: factor of the scores.
        factor: factor of each of the tensors.
        grown: factor of the outputs, before they are rounded to e4m3.
        failed: reasons by name.
    """
    import torch

    try:
        numbers = [
            torch.full((1, 1, 1, 1), number, device="cuda")
            for number in (*[factor] * 3, 1 / SCORES, SCORES, grown)
        ]
        return list(_plans(problem, [*tensors, *numbers], scale, failed))
    except FAILURES as exc:
        failed["cudnn"] = first_line(exc)
        return []


def _plans(
    problem: AttentionProblem, tensors: Sequence[Any], scale: float, failed: dict[str, str]
) -> Iterator[Contender]:
    cudnn = cudnn_plans.frontend()
    handle = cudnn_graph.handle_of(cudnn, 0, stream_of(tensors[0].device))
    errors = (*FAILURES, cudnn.cudnnGraphNotSupportedError)
    labels: set[str] = set()
    for heuristic in cudnn_graph.HEURISTICS:
        try:
            named = Fp8Graph(cudnn, problem, scale, "AUTO", handle).planned(heuristic)
        except errors as exc:
            failed[f"cudnn {heuristic}"] = first_line(exc)
            continue
        for one in named:
            knobs = ",".join(f"{name}={value}" for name, value in one.knobs)
            label = f"cudnn {one.engine} {knobs}"
            if label in labels:
                continue
            try:
                graph = Fp8Graph(cudnn, problem, scale, "AUTO", handle)
                plan = graph.built(one.engine, dict(one.knobs))
            except errors as exc:
                failed[label] = first_line(exc)
                continue
            labels.add(label)
            yield Contender(label, _call(problem, tensors, cudnn, plan))


def _call(problem: AttentionProblem, tensors: Sequence[Any], cudnn: Any, plan: Any) -> Any:
    import torch

    largest = [torch.zeros(1, 1, 1, 1, device="cuda") for _ in range(2)]
    shape, strides = problem.output.shape, problem.output.strides

    def call(_: int) -> Any:
        out = torch.empty_strided(shape, strides, dtype=torch.float8_e4m3fn, device="cuda")
        size = max(1, plan.workspace_bytes)
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        operands = dict(enumerate((*tensors, out, *largest), 1))
        handle = cudnn_graph.handle_of(cudnn, 0, stream_of(out.device))
        plan.execute(operands, workspace, handle)
        return out

    return call
