"""`tune_linear_` over Transformers' fine-grained fp8."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tuner.problem import GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
fp8 = pytest.importorskip(
    "transformers.integrations.finegrained_fp8", reason="transformers is not installed"
)

import tuner  # noqa: E402  (needs torch)

N, K = 264, 400


def layer(**options: Any) -> Any:
    torch.manual_seed(0)
    made = fp8.FP8Linear(K, N, block_size=(128, 128), has_bias=True, **options)
    with torch.no_grad():
        made.weight.copy_(torch.randn(N, K).to(torch.float8_e4m3fn))
        made.weight_scale_inv.copy_(torch.rand(made.weight_scale_inv.shape) + 0.5)
        made.bias = torch.nn.Parameter(torch.randn(N).bfloat16())
    return made.requires_grad_(False)


def test_a_layer_calls_the_tuner_and_comes_back(
    on_cpu: SimpleNamespace, undecided: list[Any]
) -> None:
    model = torch.nn.Sequential(layer(), torch.nn.Linear(N, 8))
    tuned = tuner.tune_linear_(model)
    assert (tuned.replaced, dict(tuned.left)) == (("0", "1"), {})
    rows = torch.randn(5, K).bfloat16()
    with torch.no_grad():
        out = model[0](rows)
    assert undecided == [GemmProblem.parse(f"M=5,N={N},K={K},dtype=e4m3,scales=block")]
    scale = model[0].weight_scale_inv.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)
    wide = (model[0].weight.float() * scale[:, :K]).bfloat16()
    assert torch.equal(out, torch.nn.functional.linear(rows, wide) + model[0].bias)
    assert tuner.tune_linear_(model).replaced == ()
    assert tuner.restore_linear_(model) == ("0", "1")
    assert [type(one) for one in model] == [fp8.FP8Linear, torch.nn.Linear]


def test_other_types_than_bf16_are_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(layer())
    tuner.tune_linear_(model)
    monkeypatch.setattr(fp8.FP8Linear, "forward", lambda self, rows: rows.sum())
    assert model(torch.ones(2, K)) == 2 * K


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation_scheme": "static"}, "by a static scheme"),
        ({"block_size": (64, 128)}, "blocks of (64, 128)"),
        ({"block_size": None}, "blocks of None"),
    ],
)
def test_layers_of_other_kinds_are_left(options: dict[str, Any], reason: str) -> None:
    made = fp8.FP8Linear(256, 256, **{"block_size": (128, 128), **options})
    tuned = tuner.tune_linear_(torch.nn.Sequential(made))
    assert tuned.replaced == () and reason in tuned.left["0"]
    assert type(made) is fp8.FP8Linear
