"""The GPU that a benchmark needs."""

from __future__ import annotations

from tuner.errors import BenchmarkError
from tuner.measurement import Status


def no_gpu(instead: str = "") -> BenchmarkError:
    """The error of a benchmark on a machine without a GPU.

    Args:
        instead: option that needs none; empty: every run needs one.
    """
    other = f"; {instead} needs none" if instead else ""
    text = f"no GPU found: kernels are timed on one{other}"
    return BenchmarkError(text, status=Status.UNAVAILABLE)


def need_gpu(instead: str = "") -> None:
    """Check that PyTorch is here and sees a GPU.

    Args:
        instead: as of `no_gpu`.

    Raises:
        BenchmarkError: when PyTorch cannot be imported, or sees none.
    """
    try:
        import torch
    except ImportError as exc:
        raise BenchmarkError(f"PyTorch cannot be imported: {exc}") from exc
    if not torch.cuda.is_available():
        raise no_gpu(instead)
