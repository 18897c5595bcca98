"""Reasons why PyTorch answers a call, not a tuned kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from tuner.hardware import TMA_ALIGNMENT_BYTES


class Kind(StrEnum):
    """Kinds of reason, as `tuner.stats` counts them."""

    OFF = "switched off"
    RANKS = "the ranks did not agree"
    SETTING = "a setting is wrong"
    STORE = "the store cannot be read"
    FILE = "a file of the tuner cannot be used"
    BUSY = "another process is timing kernels"
    CAPTURING = "a kernel cannot be loaded inside a graph capture"
    MISS = "no measured winner"
    VENDOR = "PyTorch's own kernel was the fastest"
    PORTFOLIO = "the portfolio chose PyTorch's"
    TIMED = "timed here, PyTorch's own attention was the fastest"
    UNSERVED = "the portfolio's kernel cannot run here"
    UNAVAILABLE = "nothing of the entry can run here"
    EXPERT_ROWS = "the kernel of experts' rows is not built or cannot run here"
    MEMORY = "out of memory"
    LAUNCH = "a launch was refused"

    SUBCLASS = "an input is not a plain tensor"
    NOT_STRIDED = "a tensor is not strided"
    DEVICE = "the tensors are not on a CUDA device"
    TRANSFORM = "a transform or a dispatch mode of torch is active"
    TANGENT = "forward-mode differentiation is active"
    NEGATIVE = "a tensor is a negative view"
    ZEROS = "a tensor of zeros has no memory"
    MISALIGNED = f"a tensor does not start at a multiple of {TMA_ALIGNMENT_BYTES} bytes"
    MIXED = "the tensors differ in device or type"
    NOT_CONTIGUOUS = "the tensors are not contiguous"
    EMPTY = "there are no queries or no keys"
    TENSORS = "no kernel takes such tensors"

    AUTOCAST = "autocast wants another type than the tensors'"
    GRADIENT = "a gradient is wanted"
    LSE = "PyTorch wants the log-sum-exp"
    MASK = "attn_mask is given"
    BLOCK_MASK = "no kernel takes such a block mask"
    DROPOUT = "dropout_p is not 0"
    SCALE = "scale is not positive"
    BOTTOM_RIGHT = "the causal mask is bottom-right"
    GROUPED_HEADS = "heads are grouped without enable_gqa"
    OUT = "out is given"
    RESULT = "a bias or a factor of the result is given"

    EXPERTS = "such experts are not tuned"
    ENCODER = "attention without a growing cache"
    ALIBI = "ALiBi"
    CACHE_TYPE = "the cache has another type than the queries"
    CONTEXT_PARALLEL = "keys are spread over ranks"
    INVARIANT = "results must not depend on the batch"
    CASCADE = "cascade attention"
    ENGINE_MASK = "the engine asks for a mask that no tuned kernel has"
    CACHE_LAYOUT = "a cache that lies in an unknown way"
    BATCHING = "continuous batching that is not served"
    QUERIES = "more queries than the settings allow"
    ENGINES = "the engine's own kernel is faster"
    SLOW_CHUNKS = "chunks are slower by the tuned kernel"
    SLOW_TYPE = "a cache of such elements is slower by the tuned kernel"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why no tuned kernel serves a call."""

    kind: Kind
    detail: str = ""
    """Details of the reason, on the same line; may be empty."""
    until: float = math.inf
    """Time (`time.monotonic`, seconds) up to which equal calls are refused, unless the store
    changes. 0: this call only."""
    lengths: tuple[int, int] | None = None
    """First and last length of a growing cache that the reason holds for; None: it does not depend
    on the length."""
    reason: str = field(init=False, compare=False, repr=False)
    """One line: the kind, then a colon and the details."""

    def __post_init__(self) -> None:
        reason = f"{self.kind}: {self.detail}" if self.detail else str(self.kind)
        object.__setattr__(self, "reason", reason)  # read by each call that it refuses


def once(kind: Kind, detail: str = "") -> Refusal:
    """A refusal of one call, for a reason that may not hold for the next."""
    return Refusal(kind, detail, 0.0)
