"""`prepare`: build the kernels that a model's calls are answered by."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tuner.compile import background
from tuner.errors import CompileError
from tuner.problem import Problem
from tuner.runtime import layers
from tuner.runtime.call import devices, dispatch
from tuner.runtime.call.table import table
from tuner.runtime.enable import enabled
from tuner.selection.answering import answering


def prepare(model: torch.nn.Module, *examples: Any) -> Counter[Problem]:
    """Build the kernels that answer a model's calls, those with the largest share of the time
    first.

    The model runs once for each example, in evaluation mode and without gradients, by PyTorch's
    kernels. Its attention counts as under `tuner.enable`; its linear layers do after
    `tune_linear_`. Then ``tuner build`` compiles in a process of its own, which tells the time left
    on standard error. Calls that are made meanwhile, by another thread, take each kernel up as it
    is done. Kernels that are there are not built again.

    Args:
        model: model on the GPU that it will run on.
        examples: inputs of the runs: a tuple of positional arguments, a mapping of keyword
            arguments, or the only argument. One for a prompt and one for decoding, say.

    Returns:
        Number of calls by problem.

    Raises:
        CompileError: when a kernel cannot be built.
        StoreError: when the store or a shipped file cannot be read.
    """
    with enabled(), layers.evaluated(model), table.noting() as calls:
        dispatch.prepare(then=table.renew).join()  # whose overrides see PyTorch's operators
        for example in examples:
            layers.run(model, example)
    gpu = devices.gpu_of(devices.current())
    own = [problem for problem in calls if answering(problem, gpu).config is not None]
    if own:
        listed = [problem for problem in own for _ in range(calls[problem])]
        if fault := background.build(listed, gpu.name, in_background=False):
            raise CompileError(f"tuner.prepare: {fault} (standard error says why)")
    return calls
