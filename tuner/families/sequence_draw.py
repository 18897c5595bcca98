"""Base of the draws of attention and of its gradients: lengths, batches and heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tuner.families.trials import Draw
from tuner.problem import AttentionBackwardProblem, AttentionProblem

MAX_LENGTH = 4096
"""Maximum length of drawn sequences; planted ones may be longer."""
BATCHES = (1, 2, 3, 5, 8, 17, 32)
#: Query and KV heads of public models: Falcon's 71 on 1, Qwen2.5's 14 on 2 and 28 on 4, GPT-2 XL's
#: 25 on 25.
HEADS = ((71, 1), (14, 2), (28, 4), (25, 25), (1, 1), (16, 16))
#: Further ratios: multiples of the heads that share a tile, with each of these KV heads.
RATIOS, KEY_HEADS = (1, 2, 3, 5, 7), (1, 2, 5)
SOFTCAPS = (50.0, 5.0)


class SequenceDraw(Draw):
    """Lengths of sequences and batches."""

    _usual: AttentionProblem | AttentionBackwardProblem

    def _holds(self, head_dim: int) -> bool:
        """True if the kernel is compiled for this head dimension too."""
        problem = replace(self._usual, head_dim=head_dim)
        return self._family.kernels(problem, self._target.config) == self._target.kernels

    def _value(self, name: str) -> Any:
        """Draw one of an axis's planted values half of the time, and any size the other half."""
        if name in ("seqlen_q", "seqlen_kv") and self._rng.random() < 0.5:
            return round(2 ** self._rng.uniform(0, MAX_LENGTH.bit_length() - 1))
        if name == "batch" and self._rng.random() < 0.5:
            return self._rng.randint(1, 4)
        return self._rng.choice(self.axes[name])

    def _lengths(self, values: Mapping[str, Any], planted: Mapping[str, Any]) -> tuple[int, int]:
        """Queries and keys; equal ones in a quarter of the draws, and where that is planted."""
        seqlen_q, seqlen_kv = values["seqlen_q"], values["seqlen_kv"]
        if planted.get("longer") == 0 or (self._rng.random() < 0.25 and "longer" not in planted):
            return (seqlen_q, seqlen_q) if "seqlen_q" in planted else (seqlen_kv, seqlen_kv)
        return seqlen_q, seqlen_kv
