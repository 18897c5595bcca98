"""Problems of each vendor family, their tensors, and a package that poses as FlashAttention."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tuner.families.peers import (
    installed,
)
from tuner.families.peers import sdpa as sdpa
from tuner.problem import (
    Problem,
)

PEER_MODULES = ("flash_attn_interface", "flash_attn", "flash_attn.cute")


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


@pytest.fixture(autouse=True)
def forget_peers_fixture() -> Iterator[None]:
    """No test sees a peer that another one made, nor one that is installed."""
    path = list(sys.path)
    modules = {name: sys.modules.pop(name, None) for name in PEER_MODULES}
    for cached in (installed._load, installed._version):
        cached.cache_clear()
    yield
    sys.path[:] = path
    for name, module in modules.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    for cached in (installed._load, installed._version):
        cached.cache_clear()


def tensors(problem: Problem) -> list[Any]:
    """Random inputs with the problem's shapes and strides."""
    import torch

    made = []
    for operand in problem.operands[:-1]:
        tensor = torch.empty_strided(
            operand.shape, operand.strides, dtype=getattr(torch, operand.dtype)
        )
        made.append(tensor.copy_(torch.randn(operand.shape)))
    return made
