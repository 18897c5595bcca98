"""Attention whose values are narrower than its keys, through the gate and as models call it."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
from gating import Gated, specs_of

from tuner.compile.compiler import Compiler
from tuner.families.base import KernelSpec
from tuner.families.fused_attention import values_rule
from tuner.families.target import Target

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TARGETS = [target for target in values_rule.targets() if target.problem.dtype == "bfloat16"]  # type: ignore[attr-defined]

#: DeepSeek-V3's widths of heads, and little else; its first layer is dense.
DEEPSEEK = {
    **{"vocab_size": 97, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"first_k_dense_replace": 1, "moe_intermediate_size": 64, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "pad_token_id": 0},
}


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return specs_of([(target.problem, target.config) for target in TARGETS])


@pytest.mark.parametrize("target", TARGETS, ids=Target.label)
@pytest.mark.parametrize("widths", [(192, 128), (136, 104)])
def test_the_gate_passes_it(gated: Gated, target: Target, widths: tuple[int, int]) -> None:
    head_dim, value_dim = widths
    sizes = {"batch": 3, "heads_q": 5, "heads_kv": 5, "seqlen_q": 333, "seqlen_kv": 1001}
    problem = replace(target.problem, head_dim=head_dim, value_dim=value_dim, **sizes)
    gated.passes(problem, target.config)


def test_deepseek_v3_s_prompts_have_a_kernel(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="torch is missing")
    transformers = pytest.importorskip("transformers", reason="transformers is missing")
    importlib.import_module("tuner.runtime.engines.transformers")
    from tuner.runtime.call import counters, proven_kernels, table

    built = {spec: f.result().key for spec, f in compiler.submit(kernels())}
    monkeypatch.setattr("tuner.runtime.call.plan.ArtifactCache", lambda: compiler.artifacts)
    monkeypatch.setattr(
        proven_kernels.lists,
        "proven",
        lambda specs, _: {name: built[spec] for name, spec in specs.items() if spec in built},
    )
    table.table.renew()
    made = []
    for implementation in ("tuner", "sdpa"):
        torch.manual_seed(0)
        config = transformers.DeepseekV3Config(**DEEPSEEK)
        model = transformers.DeepseekV3ForCausalLM._from_config(
            config, attn_implementation=implementation
        )
        made.append(model.eval().bfloat16().cuda())
    ids = torch.randint(2, 97, (2, 300), device="cuda")
    counters.stats(reset=True)
    with torch.no_grad():
        own, others = (model(ids, use_cache=False).logits.float() for model in made)
    assert counters.stats().hits == DEEPSEEK["num_hidden_layers"], counters.stats()
    assert (own - others).norm() < 2e-2 * others.norm()
    table.table.renew()
