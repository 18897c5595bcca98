"""Errors of a model's logits by each attention, against the same model in fp64.

``scripts/bench logits`` builds small models of four architectures with random weights. Each runs a
prompt and one more token on its cache. Attention is Transformers' ``eager`` and ``sdpa``, and the
fused kernel, which is forced onto every call. A beam search may end differently with errors up to
those of ``sdpa``: it then chose between near ties.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks.forced import made
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import family
from tuner.problem import AttentionProblem

FAMILY = "fused_attention"
FORCED = "forced"
IMPLEMENTATIONS = ("eager", "sdpa", FORCED)
TOP = 4
"""Tokens that a search of as many beams looks at."""


class ForcedAttention:
    """The fused kernel for any attention without a mask, as Transformers calls it."""

    def __init__(self) -> None:
        self._forced = made([FAMILY])
        self._plans: dict[Any, Any] = {}
        self.calls = 0

    def __call__(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Any, None]:
        """Attention as Transformers calls it: (B, H, S, D) to (B, S, H, D)."""
        if attention_mask is not None or dropout:
            raise ConfigError("a mask or dropout reached the forced kernel")
        causal = query.shape[2] > 1
        query, key, value = (tensor.contiguous() for tensor in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        kind = (query.shape, key.shape, query.dtype, causal, scale)
        if kind not in self._plans:
            self._plans[kind] = self._plan(query, key, value, causal, scale)
        self.calls += 1
        return self._plans[kind].run(query, key, value).transpose(1, 2).contiguous(), None

    def _plan(self, query: Any, key: Any, value: Any, causal: bool, scale: float) -> Any:
        from tuner.runtime.attention.attention_call import pose
        from tuner.runtime.call.plan import KernelPlan, own_plan

        posed = pose(query, key, value, causal, scale)
        problem = cast(AttentionProblem, posed.problem)
        measurement = self._forced.measurement(problem)
        if measurement is None:
            raise BenchmarkError(f"{problem.label()}: {FAMILY} has no legal config")
        plan = own_plan(posed, family(FAMILY), measurement, query.get_device())
        if not isinstance(plan, KernelPlan):
            raise BenchmarkError(f"{problem.label()}: {plan}")
        return plan


def models() -> dict[str, Callable[[], Any]]:
    """A configuration each of four architectures, four layers deep; D 64 and 96."""
    from transformers import LlamaConfig, OPTConfig, Phi3Config, Qwen2Config

    sizes: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": 4096}
    return {
        "llama D=64": lambda: LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_attention_heads=16,
            num_key_value_heads=4, **sizes,
        ),
        "qwen2 D=64": lambda: Qwen2Config(
            hidden_size=896, intermediate_size=2432, num_attention_heads=14,
            num_key_value_heads=2, **sizes,
        ),
        "phi3 D=96": lambda: Phi3Config(
            hidden_size=768, intermediate_size=2048, num_attention_heads=8,
            num_key_value_heads=8, pad_token_id=0, **sizes,
        ),
        "opt D=64": lambda: OPTConfig(
            hidden_size=768, ffn_dim=3072, num_attention_heads=12, word_embed_proj_dim=768, **sizes
        ),
    }  # fmt: skip


def logits(model: Any, tokens: Any, following: Any) -> Any:
    """Logits of a prompt, and of one token more on its cache: (B, S + 1, vocabulary), fp64."""
    import torch

    with torch.no_grad():
        first = model(tokens, use_cache=True)
        second = model(following, past_key_values=first.past_key_values, use_cache=True)
    return torch.cat([first.logits, second.logits], dim=1).double()


def rows(forced: ForcedAttention, seeds: int) -> list[dict[str, Any]]:
    """One row a model, seed and implementation: its error, and the top tokens that differ."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(FORCED, forced)
    AttentionMaskInterface.register(FORCED, sdpa_mask)
    found: list[dict[str, Any]] = []
    for name, configured in models().items():
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(configured()).eval().cuda().bfloat16()
            length = int(torch.randint(33, 400, ()))
            tokens = torch.randint(1, 4096, (2, length), device="cuda")
            following = torch.randint(1, 4096, (2, 1), device="cuda")
            seen = {}
            for implementation in IMPLEMENTATIONS:
                model.set_attn_implementation(implementation)
                seen[implementation] = logits(model, tokens, following)
            print(f"{name}, seed {seed}: {length} tokens", file=sys.stderr)
            model.set_attn_implementation("eager")
            exact = logits(model.double(), tokens, following)
            best = exact.topk(TOP, dim=-1).indices.sort(-1).values
            for implementation, got in seen.items():
                top = got.topk(TOP, dim=-1).indices.sort(-1).values
                found.append(
                    {
                        "model": name,
                        "seed": seed,
                        "tokens": length,
                        "attention": implementation,
                        "error": float((got - exact).norm() / exact.norm()),
                        "top_differs": float((top != best).any(-1).double().mean()),
                    }
                )
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """A line a model: the median error of each attention, and its share of other top tokens."""
    lines = [f"{'model':12s}" + "".join(f"{name:>22s}" for name in IMPLEMENTATIONS)]
    for model in dict.fromkeys(row["model"] for row in found):
        cells = ""
        for name in IMPLEMENTATIONS:
            mine = [r for r in found if r["model"] == model and r["attention"] == name]
            error = statistics.median(row["error"] for row in mine)
            differs = statistics.mean(row["top_differs"] for row in mine)
            cells += f"{error:12.3e} {100 * differs:7.2f} %"
        lines.append(f"{model:12s}{cells}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run it; prints the table and writes the rows.

    Raises:
        BenchmarkError: when there is no GPU or no PyTorch.
        ConfigError: when the options are out of range.
    """
    parser = Parser(prog="scripts/bench logits", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="random models of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row here")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        raise ConfigError(f"--seeds {args.seeds} is out of range (allowed: 1 and more)")
    check_place(args.json)
    forced = ForcedAttention()
    found = rows(forced, args.seeds)
    import torch
    import transformers

    print(table(found), file=sys.stdout)
    if args.json:
        environment = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "forced_calls": forced.calls,
        }
        write_json(args.json, {"environment": environment, "rows": found})
    return 0
