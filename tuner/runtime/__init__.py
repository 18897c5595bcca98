"""What a model calls. Reads the store and the artifacts; compiles and tunes nothing."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as exc:
    raise ImportError(
        f"tuner.attention needs PyTorch ({exc}): pip install 'cutlass-tuner[torch]'"
    ) from exc

from tuner.runtime.attention import attention

__all__ = ["attention"]
