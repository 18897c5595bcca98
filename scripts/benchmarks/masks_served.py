"""`tuner.sparse_attention` at shapes that nobody tuned, beside compiled FlexAttention.

``scripts/bench masks --served`` times calls that the portfolio's kernels answer: few and many
tiles, grouped heads, every compiled head dimension, soft caps, under the masks of `MASKS`. A case
that FlexAttention answered says so, and has no time of an own kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.call_times import Contender, Times, time_calls
from tuner.problem import AttentionProblem

DOCUMENT, WINDOW, PREFIX = 512, 1024, 512
#: True where query q sees key k; of numbers, and of tensors of them.
MASKS: Mapping[str, Callable[[Any, Any], Any]] = {
    "causal": lambda q, k: k <= q,
    "documents": lambda q, k: q // DOCUMENT == k // DOCUMENT,
    "window": lambda q, k: (k <= q) & (q - k < WINDOW),
    "prefix": lambda q, k: (k <= q) | (k < PREFIX),
}
SHAPES = (
    "B=1,H=8,S=256,D=64",
    "B=1,H=16,S=1024,D=64",
    "B=2,H=32,HKV=8,S=2048,D=64",
    "B=1,H=16,S=16384,D=64",
    "B=4,H=16,S=1024,D=64,softcap=50",
    "B=1,H=8,S=256,D=128",
    "B=1,H=16,S=1024,D=128",
    "B=2,H=32,HKV=8,S=2048,D=128",
    "B=1,H=32,HKV=8,S=8192,D=128",
    "B=4,H=16,S=1024,D=128,softcap=50",
    "B=1,H=17,S=1024,D=96",
    "B=2,H=16,S=4096,D=96",
    "B=1,H=8,S=512,D=256",
    "B=2,H=16,S=4096,D=256",
    "B=2,H=8,HKV=4,S=4096,D=256,softcap=50",
)
"""Problems, all bf16."""
NAMES = "causal", "documents"
"""Masks of each."""


@dataclass(frozen=True)
class Served:
    """One call."""

    shape: str
    mask: str

    @functools.cached_property
    def problem(self) -> AttentionProblem:
        return AttentionProblem.parse(f"{self.shape},dtype=bf16,block_mask=1")

    def label(self) -> str:
        return f"{self.mask} {self.shape}"


def cases(names: Sequence[str] = ()) -> Iterator[Served]:
    """Every shape under the masks of `names`; under those of `NAMES` where none is named."""
    for shape in SHAPES:
        for name in names or NAMES:
            yield Served(shape, name)


class Calls:
    """A case's tensors, and both ways to answer it."""

    def __init__(self, case: Served) -> None:
        """Args: case: what is computed."""
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        problem, seen = case.problem, MASKS[case.mask]
        torch.manual_seed(0)
        self.tensors = [
            torch.randn(operand.shape, device="cuda", dtype=torch.bfloat16)
            for operand in problem.matrices[:3]
        ]
        self.source, self.softcap = self.tensors[0].clone(), problem.softcap
        self.block_mask = create_block_mask(
            lambda b, h, q, k: seen(q, k),
            None,
            None,
            problem.seqlen_q,
            problem.seqlen_kv,
            device="cuda",
        )
        self.options: dict[str, Any] = {
            "block_mask": self.block_mask,
            "scale": problem.head_dim**-0.5,
            "enable_gqa": problem.heads_q != problem.heads_kv,
        }
        if cap := self.softcap:

            def capped(score: Any, *_: Any) -> Any:
                return cap * torch.tanh(score / cap)

            self.options["score_mod"] = capped
        self._compiled: Any = torch.compile(flex_attention, dynamic=False)

    def before(self, _: int) -> Any:
        """Writes the queries."""
        import torch

        return torch.add(self.source, 0.0, out=self.tensors[0])

    def flex(self, _: int) -> Any:
        """FlexAttention, compiled in the first call."""
        return self._compiled(*self.tensors, **self.options)

    def own(self, _: int) -> Any:
        """The runtime's answer."""
        import tuner

        query, key, value = self.tensors
        return tuner.sparse_attention(query, key, value, self.block_mask, softcap=self.softcap)


def timed(case: Served, calls: Calls) -> dict[str, Any]:
    """Times of a case, and how far both answers are from each other."""
    import tuner

    wanted, hits = calls.flex(0).float(), tuner.stats().hits
    got = calls.own(0).float()
    error = float((got - wanted).norm() / wanted.norm())
    ways = [Contender("flex", calls.flex)]
    is_own = tuner.stats().hits > hits
    if is_own:
        ways.append(Contender("own", calls.own))
    times: Times = time_calls(ways, calls.before, 1)
    reason = "" if is_own else ", ".join(tuner.stats().fallbacks)
    failed = {**times.failed, **({"own": reason} if reason else {})}
    return {"case": case.label(), "us": times.us, "failed": failed, "difference": error}


def line(found: Mapping[str, Any]) -> str:
    """A row of the table."""
    us, failed = found["us"], found["failed"]
    texts = [f"{name} {us[name]:8.1f} us" for name in ("own", "flex") if name in us]
    if len(us) == 2:
        texts.append(f"{us['flex'] / us['own']:6.3f}")
    texts += [f"{name}: {reason}" for name, reason in failed.items()]
    return " | ".join([f"{found['case']:48}", *texts, f"off {found['difference']:.1e}"])
