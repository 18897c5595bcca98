"""PyTorch's fused attention backends, and FlashAttention-3 and -4 where the user has them."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from tuner import settings
from tuner.config import Config
from tuner.families.vendor import FAILURES, Vendor
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import AttentionProblem, Problem

#: torch.nn.attention.SDPBackend member of each kernel that torch carries.
BACKENDS = {
    "cudnn": "CUDNN_ATTENTION",
    "flash2": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
}
#: kernel -> (module under TUNER_PEERS_PATH, package, its distributions)
PEERS = {
    "flash3": ("fa3", "flash_attn_interface", ("flash-attn-3", "flash_attn_3")),
    "flash4": ("fa4", "flash_attn.cute", ("flash-attn-4", "flash_attn_4")),
}
#: kernel -> microseconds of a tiny call, then TFLOP/s of a large one: full and causal at D <= 64,
#: full and causal above. From one H200, CUDA 13.0, torch 2.11, cuDNN 9.19: (16,16,2048,64) and
#: (4,16,2048,128), and (1,16,1024,64) for the first. `efficient` was not measured: taken at 0.6
#: of flash2.
RATES: dict[str, tuple[float, float, float, float, float]] = {
    "cudnn": (5.0, 463, 378, 623, 462),
    "flash2": (7.0, 296, 250, 344, 254),
    "efficient": (7.0, 178, 150, 206, 152),
    "flash3": (10.0, 488, 409, 653, 568),
    "flash4": (6.5, 499, 373, 640, 528),
}

Attend = Callable[..., Any]
"""attend(query, key, value, causal=, scale=) over (B, S, H, D) tensors."""


class VendorSdpa(Vendor):
    """``kernel``: a backend of torch (cudnn, flash2, efficient) or a peer (flash3, flash4)."""

    name: ClassVar[str] = "vendor_sdpa"
    op: ClassVar[str] = AttentionProblem.op
    offered: ClassVar[tuple[str, ...]] = (*BACKENDS, *PEERS)

    def refusal(self, problem: Problem, kernel: str) -> str:
        if not isinstance(problem, AttentionProblem):
            return ""
        square = problem.seqlen_q == problem.seqlen_kv
        if problem.is_causal and not square and kernel in ("flash2", *PEERS):
            return f"{kernel} aligns a causal mask bottom-right: SQ and SKV must be equal"
        return ""

    def connect(self, problem: AttentionProblem, kernel: str, scale: float) -> Attend | str:
        if kernel in BACKENDS:
            return _backend_call(problem, BACKENDS[kernel], scale)
        attend = peer(kernel)
        return attend if isinstance(attend, str) else peer_call(attend, problem, scale)

    def environment(self) -> Mapping[str, str]:
        peers = {kernel: version for kernel in PEERS if (version := peer_version(kernel))}
        return {**super().environment(), **peers}

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """A fixed part plus the work at the rate of a large problem."""
        if not isinstance(problem, AttentionProblem):
            return float("inf")
        start_us, *rates = RATES[config["kernel"]]
        rate = rates[2 * (problem.head_dim > 64) + problem.is_causal]
        rate *= gpu.peak_tflops / DEFAULT_GPU.peak_tflops
        return start_us + max(problem.flops / rate / 1e6, problem.bytes / gpu.memory_gbs / 1e3)


def _backend_call(problem: AttentionProblem, backend: str, scale: float) -> Attend:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)
    options: dict[str, Any] = {"is_causal": problem.is_causal, "scale": scale}
    if problem.heads_q != problem.heads_kv:
        options["enable_gqa"] = True

    def call(query: Any, key: Any, value: Any) -> Any:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

    return call


def peer_call(attend: Attend, problem: AttentionProblem, scale: float) -> Attend:
    """A peer's (B, S, H, D) kernel over the problem's (B, H, S, D) tensors, by views alone."""

    def call(query: Any, key: Any, value: Any) -> Any:
        tensors = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return attend(*tensors, causal=problem.is_causal, scale=scale).transpose(1, 2)

    return call


def peer(kernel: str) -> Attend | str:
    """FlashAttention-3's or -4's forward pass, or why this machine has none.

    A module under ``TUNER_PEERS_PATH`` comes before a package there, and that before an
    installed one.
    """
    return _load_peer(kernel, settings.peers_path())


@cache
def _load_peer(kernel: str, folder: Path | None) -> Attend | str:
    module_name, package, _ = PEERS[kernel]
    try:
        if folder and (file := folder / f"{module_name}.py").is_file():
            module = _load_file(f"tuner_peer_{module_name}", file)
            return _only_output(module.fwd, "scale")
        if folder and str(folder) not in sys.path:
            sys.path.append(str(folder))
        return _only_output(importlib.import_module(package).flash_attn_func, "softmax_scale")
    except ModuleNotFoundError as exc:
        if exc.name and package.startswith(exc.name):
            return f"{kernel} is not here: no {package}, no {module_name}.py in TUNER_PEERS_PATH"
        return f"{kernel} cannot be loaded: {exc}"
    except FAILURES as exc:
        return f"{kernel} cannot be loaded: {type(exc).__name__} {exc}"


def _load_file(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _only_output(function: Callable[..., Any], scale_name: str) -> Attend:
    """One signature for all peers; some return the log-sum-exp too."""

    def attend(query: Any, key: Any, value: Any, *, causal: bool, scale: float) -> Any:
        result = function(query, key, value, causal=causal, **{scale_name: scale})
        return result[0] if isinstance(result, tuple | list) else result

    return attend


def peer_version(kernel: str) -> str:
    """What names the peer's build: a package's version, or a hash of a module's files."""
    return _peer_version(kernel, settings.peers_path())


@cache
def _peer_version(kernel: str, folder: Path | None) -> str:
    module_name, package, distributions = PEERS[kernel]
    if folder and (folder / f"{module_name}.py").is_file():
        content = hashlib.sha256()
        for file in sorted(folder.glob(f"{module_name}*")):
            if file.is_file():
                content.update(file.name.encode() + b"\0" + file.read_bytes())
        return content.hexdigest()[:16]
    places = [str(folder), *sys.path] if folder else sys.path
    for name in distributions:
        for found in importlib.metadata.distributions(name=name, path=places):
            return str(found.version)
    try:
        return "unversioned" if importlib.util.find_spec(package) else ""
    except (ImportError, ValueError):
        return ""
