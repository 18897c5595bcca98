"""The way of every call: guards, key, table, alignment, launch; else PyTorch and a count."""

from __future__ import annotations

import torch

from tuner.runtime import counters, dispatch, guards
from tuner.runtime.call import Call
from tuner.runtime.plan import Plan
from tuner.runtime.refusal import Kind, Refusal
from tuner.runtime.table import table


def serve(call: Call) -> torch.Tensor:
    """The output of a call, by a tuned kernel or by PyTorch; PyTorch's in a graph of torch.compile.

    Raises:
        Whatever PyTorch raises on arguments that it refuses, and what CUDA reports of an earlier
        kernel.
    """
    out = None if torch.compiler.is_compiling() else answer(call)
    return call.by_pytorch() if out is None else out


def answer(call: Call) -> torch.Tensor | None:
    """A tuned kernel's output, or None, counted by its reason, where PyTorch must answer."""
    generation = table.refresh(call.inputs[0])
    plan = find(call)
    out = plan if isinstance(plan, Refusal) else call.run(plan)
    if not isinstance(out, Refusal):
        return out
    if (told := call.told) is None:
        counters.count_fallback(out.reason)
    else:
        dispatch.refuse(*told, out, generation)
    return None


def find(call: Call) -> Plan | Refusal:
    """The plan that serves a call, or the reason why there is none; runs and counts nothing.

    Looks neither at gradients nor at autocast, which a call does in `Call.run`.
    """
    inputs = call.inputs
    refusal = guards.unserved(inputs) or call.refusal()
    if refusal is not None:
        return refusal
    kind = call.kind()
    plan = table.get(kind)
    if plan is None:
        plan = table.find_out(kind, call)
    if isinstance(plan, Plan) and guards.is_misaligned(inputs[: call.aligned]):
        return Refusal(Kind.MISALIGNED)
    return plan
