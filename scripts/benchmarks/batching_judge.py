"""Generated tokens beside the same model in fp32, for ``scripts/bench batching --judge FILE``.

Two correct kernels part at the first near tie of their logits, and every later token follows
another text. So each attention is judged by its own text. The model in fp32 reads the prompt and
the generated tokens, and gives its logits for each.

A correct token is fp32's first choice, or its logit is as close to the first as bf16 moves logits.
As the measure of that, the same model reads the tokens of `sdpa` in bf16, with dense attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tuner.selection.describe import table

HEADING = ("attention", "tokens", "first choice", "within rounding", "mean gap", "largest gap")


def judged(
    model: Any, prompts: Sequence[Sequence[int]], ways: Mapping[str, Sequence[Sequence[int]]]
) -> dict[str, Any]:
    """Figures of each attention's tokens.

    Args:
        model: makes the logits, in bf16; is turned to fp32.
        prompts: tokens of each request.
        ways: new tokens of each request, by attention; the first is also read in bf16.

    Returns:
        ``rounding``, quantiles of how far bf16 moves the first and second logit apart. ``ties``,
        quantiles of their distance in fp32. ``of``, for each attention ``tokens``, ``first``,
        ``within``, ``mean_gap`` and ``largest_gap``.
    """
    import torch

    with torch.inference_mode():
        first = next(iter(ways.values()))
        rounded = [logits.to(torch.bfloat16) for logits in _logits(model, prompts, first)]
        model.float()
        errors, ties = [], []
        for low, logits in zip(rounded, _logits(model, prompts, first), strict=True):
            top = logits.topk(2, dim=-1)
            ties.append(top.values[:, 0] - top.values[:, 1])
            # What decides between two tokens is the difference of their errors.
            moved = low.float().gather(-1, top.indices) - top.values
            errors.append((moved[:, 0] - moved[:, 1]).abs())
        error, tie = torch.cat(errors), torch.cat(ties)
        limit = float(error.max())
        of: dict[str, dict[str, float]] = {}
        for way, tokens in ways.items():
            gaps = torch.cat([_gaps(*one) for one in _read(model, prompts, tokens)])
            of[way] = {
                "tokens": gaps.numel(),
                "first": float((gaps == 0).double().mean()),
                "within": float((gaps <= limit).double().mean()),
                "mean_gap": float(gaps.mean()),
                "largest_gap": float(gaps.max()),
            }
    return {"rounding": _quantiles(error), "ties": _quantiles(tie), "of": of}


def _read(
    model: Any, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> Iterator[tuple[Any, Sequence[int]]]:
    yield from zip(_logits(model, prompts, tokens), tokens, strict=True)


def _logits(
    model: Any, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> Iterator[Any]:
    """The logits (new tokens, vocabulary) from which each request's tokens were to be chosen."""
    import torch

    for prompt, new in zip(prompts, tokens, strict=True):
        text = torch.tensor([[*prompt, *new[:-1]]], device=model.device)
        out = model(input_ids=text, use_cache=False, logits_to_keep=len(new)).logits
        yield out[0, -len(new) :]


def _gaps(logits: Any, tokens: Sequence[int]) -> Any:
    """Distances of the tokens' logits from the largest."""
    import torch

    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    return logits.amax(-1) - logits.gather(-1, chosen)[:, 0]


def _quantiles(values: Any) -> dict[str, float]:
    return {
        "median": float(values.quantile(0.5)),
        "0.99": float(values.quantile(0.99)),
        "largest": float(values.max()),
    }


def report(found: Mapping[str, Any]) -> str:
    """A line for each attention, and the measures of ties and rounding.

    Args:
        found: as of `judged`.
    """
    lines = [HEADING]
    for way, one in found["of"].items():
        shares = f"{one['first']:.2%}", f"{one['within']:.2%}"
        gaps = f"{one['mean_gap']:.5f}", f"{one['largest_gap']:.4f}"
        lines.append((way, str(one["tokens"]), *shares, *gaps))
    said = [table(lines, frozenset(range(1, 6)))]
    for name, text in (("ties", "first to second logit in fp32"), ("rounding", "moved by bf16")):
        parts = ", ".join(f"{key} {value:.4f}" for key, value in found[name].items())
        said.append(f"{text}: {parts}")
    return "\n".join(said)
