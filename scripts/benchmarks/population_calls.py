"""One drawn call on a device: who answers it, how far they are from fp32, and how long they take.

Each contender's output is compared with a reference in fp32 over some rows and heads, and with
PyTorch's over all, before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

import tuner
from benchmarks import harness
from benchmarks.call_times import BUDGET_US
from benchmarks.harness import FAILURES, Contender, first_line
from benchmarks.population_tensors import Inputs, copies_of, made, posed
from benchmarks.population_ways import activation, contenders
from benchmarks.rows import PYTORCH, TUNER
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import AttentionProblem, GemmProblem, SwigluProblem
from tuner.problem.population import ModelCall
from tuner.runtime.call.refusal import Kind
from tuner.selection.reader import LookupResult
from tuner.store.entry import is_vendor

REFERENCE_ROWS = 128
"""Rows at either end that the reference is computed for."""
LIMITS = {torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Relative Frobenius error that an output may have, or twice PyTorch's own."""
OWN, SELECTED = "own decision", "selection"
CHOSEN, REFUSED, FAILED = "PyTorch's by choice", "refused", "failed"
KINDS = {"exact": OWN, "portfolio": SELECTED}
"""Kinds of a lookup result as rows name them; a kind that is not here keeps its name."""


def answered(stats: Any, answer: LookupResult | None) -> tuple[str, str]:
    """Kind of answer that one call of the tuner got, and the reason where PyTorch answered.

    Args:
        stats: `tuner.stats` of that call.
        answer: lookup result for the problem, None where there is none.
    """
    if stats.errors and not stats.hits:
        return REFUSED, next(iter(stats.errors))
    if stats.fallbacks:
        reason = next(iter(stats.fallbacks))
        return (CHOSEN if reason == Kind.VENDOR else REFUSED), reason
    if not stats.hits:
        return REFUSED, "not counted"
    if owners := [owner for owner in stats.peers if owner != "pytorch"]:
        return owners[0], ""
    kind = OWN if answer is None else KINDS[answer.kind]
    if answer is not None and is_vendor(answer.candidates[0].config):
        return CHOSEN, str(answer.candidates[0].config.get("kernel"))
    return kind, ""


def measured(
    call: ModelCall,
    device: str = "cuda",
    compiles: bool | None = None,
    budget_us: float = BUDGET_US,
    further: Callable[[Sequence[Inputs]], Iterable[Contender]] = lambda inputs: (),
    peers: bool = True,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """One row: who answered, errors and microseconds by contender, and why others have none.

    Args:
        call: the call.
        device: device of its tensors.
        compiles: as of `contenders`.
        budget_us: as of `time_calls`.
        further: makes other contenders from the copies of the tensors.
        peers: False to leave out all others but PyTorch and the tuner.
        without: names of contenders to leave out.
    """
    torch.manual_seed(0)
    inputs = made(call, device, copies_of(call))
    usual = contenders(call, inputs, compiles)
    ways = [way for way in usual if peers or way.name in (PYTORCH, TUNER)]
    ways = [way for way in ways if way.name not in without]
    ways += further(inputs)
    with torch.inference_mode():
        outputs, failed, kind, reason = _outputs(call, ways)
        errors = _errors(call, inputs[0], outputs)
        dtype = inputs[0].tensors[0].dtype
        bound = max(LIMITS[dtype], 2 * errors.get(PYTORCH, 0.0))
        wrong = sorted(name for name, error in errors.items() if not error <= bound)
        del outputs
        fit = [way for way in ways if way.name in errors and way.name not in wrong]

        def before(i: int) -> None:
            torch.mul(inputs[i].source, 1.0, out=inputs[i].tensors[0])

        times = harness.time_calls(fit, before, len(inputs), budget_us)
    return {
        **{"answered": kind, "reason": reason, "us": times.us, "errors": errors, "wrong": wrong},
        **{"failed": {**failed, **times.failed}, "copies": len(inputs)},
        "seconds": dict(times.seconds),
    }


def _outputs(
    call: ModelCall, ways: Sequence[Contender]
) -> tuple[dict[str, Any], dict[str, str], str, str]:
    """Each contender's output of the first copy, why others have none, and what the tuner did."""
    outputs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    kind, reason = REFUSED, ""
    for one in ways:
        if one.name == TUNER:
            tuner.stats(reset=True)
        try:
            with one.around():
                outputs[one.name] = one.call(0)
        except FAILURES as exc:
            failed[one.name] = first_line(exc)
        if one.name == TUNER:
            kind, reason = answered(tuner.stats(reset=True), _looked_up(call))
    if TUNER not in outputs:
        kind, reason = FAILED, failed[TUNER]
    return outputs, failed, kind, reason


def _looked_up(call: ModelCall) -> LookupResult | None:
    try:
        return tuner.lookup(posed(call), gpu=_gpu())
    except tuner.TunerError:
        return None


def _gpu() -> Gpu:
    from tuner.runtime.call import devices

    return devices.gpu_of(0) if torch.cuda.is_available() else DEFAULT_GPU


def _errors(call: ModelCall, at: Inputs, outputs: Mapping[str, Any]) -> dict[str, float]:
    """The larger relative error of each output: from the fp32 reference over its rows, and from
    PyTorch's output over all. That of SwiGLU is each one's own, for the weights differ in order.
    Rows of attention that see no key are left out.
    """
    cut, reference = _references(call, at)
    if at.seen is not None:
        outputs = {name: out.masked_fill(~at.seen, 0.0) for name, out in outputs.items()}
    found = {}
    for name, out in outputs.items():
        is_interleaved = isinstance(call.problem, SwigluProblem) and name == TUNER
        wanted = reference(is_interleaved)
        error = _relative(cut(out), wanted)
        if PYTORCH in outputs and not isinstance(call.problem, SwigluProblem):
            error = max(error, _relative(out, outputs[PYTORCH]) if name != PYTORCH else 0.0)
        found[name] = error
    return found


def _relative(got: Any, wanted: Any) -> float:
    difference = torch.linalg.vector_norm(got - wanted, dtype=torch.float32)
    norm = torch.linalg.vector_norm(wanted, dtype=torch.float32)
    return float(difference / norm.clamp_min(1e-30))


def _ends(count: int, device: Any) -> Any:
    """Indices of the first and the last rows."""
    rows = torch.arange(count, device=device)
    return torch.unique(torch.cat([rows[:REFERENCE_ROWS], rows[-REFERENCE_ROWS:]]))


def _references(call: ModelCall, at: Inputs) -> tuple[Callable[[Any], Any], Callable[[bool], Any]]:
    """Function that cuts the reference's rows out of an output, and the reference in fp32."""
    problem = call.problem
    if isinstance(problem, AttentionProblem):
        return _attention_reference(problem, at)
    x, weight, bias = at.tensors
    rows = _ends(x.shape[0], x.device)

    def reference(is_interleaved: bool) -> Any:
        part, wide = x[rows].float(), weight.float()
        if isinstance(problem, GemmProblem):
            product = functional.linear(part, wide, None if bias is None else bias.float())
            return activation(problem.activation)(product)
        if is_interleaved:
            groups = functional.linear(part, wide).unflatten(-1, (-1, 8, 4, 2))
            gate, up = (t.flatten(-3) for t in groups.transpose(-3, -2).unbind(-1))
        else:
            gate, up = functional.linear(part, wide).chunk(2, -1)
        return functional.silu(gate) * up

    return lambda out: out[rows], reference


def _attention_reference(
    problem: AttentionProblem, at: Inputs
) -> tuple[Callable[[Any], Any], Callable[[bool], Any]]:
    """Over the first and last rows of the first sequence's first and the last one's last head."""
    query, key, value = at.tensors
    rows = _ends(problem.seqlen_q, query.device)
    group = problem.heads_q // problem.heads_kv
    pairs = [(0, 0), (problem.batch - 1, problem.heads_q - 1)]

    def one(batch: int, head: int) -> Any:
        scores = query[batch, head, rows].float() @ key[batch, head // group].float().T
        scores *= problem.head_dim**-0.5
        if problem.softcap:
            scores = problem.softcap * torch.tanh(scores / problem.softcap)
        if at.mask is not None:
            whole = at.mask.expand(problem.batch, problem.heads_q, problem.seqlen_q, -1)
            part = whole[batch, head, rows]
            is_bool = part.dtype == torch.bool
            scores = scores.masked_fill(~part, -torch.inf) if is_bool else scores + part.float()
        if problem.is_causal or problem.is_windowed:
            left, right = problem.visible
            away = torch.arange(problem.seqlen_kv, device=query.device) - rows[:, None]
            scores = scores.masked_fill((away < -left) | (away > right), -torch.inf)
        is_blind = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(is_blind, 0.0).softmax(-1).masked_fill(is_blind, 0.0)
        return weights @ value[batch, head // group].float()

    def cut(out: Any) -> Any:
        return torch.stack([out[batch, head, rows] for batch, head in pairs])

    def reference(_: bool) -> Any:
        return torch.stack([one(batch, head) for batch, head in pairs])

    return cut, reference
