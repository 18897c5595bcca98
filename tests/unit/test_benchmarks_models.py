"""``scripts/bench models``: small models on the CPU, and the table."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import models
from benchmarks.models import (
    CACHES,
    DECODERS,
    LAYERS,
    MODELS,
    MODES,
    TORCH,
    WAYS,
    main,
    measure,
    report,
)

PLAIN = ("flux",)
"""Models that need no Transformers."""


@pytest.fixture
def short(monkeypatch: Any) -> None:
    monkeypatch.setattr(models, "GENERATED", 5)
    monkeypatch.setattr(models, "PASSES", 1)


def built(model: str, mode: str) -> dict[str, Any]:
    pytest.importorskip("torch", reason="torch is not installed")
    if model not in PLAIN:
        pytest.importorskip("transformers", reason="transformers is not installed")
    from benchmarks.models_built import Sizes

    sizes = Sizes(layers=1, heads=4, batch=2, tokens=24, vocab=64)
    return measure(model, mode, 1, "cpu", rounds=1, sizes=sizes)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_built_and_counted(model: str, short: None) -> None:
    ways = built(model, "eager")["ways"]
    assert set(ways) == set(WAYS)
    for way, found in ways.items():
        assert found["tokens_per_s"] > 0, (way, found)
        assert found["error"] < 0.02
        assert found["hits"] == 0
    asked = ways["attn_implementation"]["fallbacks"]
    assert sum(asked.values()) == 1
    has_linear = model != "gpt2"  # its layers are Transformers' Conv1D
    assert bool(ways[LAYERS]["fallbacks"]) == has_linear
    assert not ways[TORCH]["fallbacks"]


@pytest.mark.parametrize("mode", CACHES)
@pytest.mark.parametrize("model", DECODERS)
def test_decoders_generate(model: str, mode: str, short: None) -> None:
    """As many calls as tokens are generated; the last hidden state is that of one whole pass."""
    ways = built(model, mode)["ways"]
    for way, found in ways.items():
        assert found["tokens_per_s"] > 0, (way, found)
        assert found["error"] < 0.02
        assert found["calls"] == 5
    assert sum(ways["attn_implementation"]["fallbacks"].values()) == 5


@pytest.mark.parametrize("mode", CACHES)
def test_what_is_generated_is_the_whole_pass(mode: str, short: None) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from benchmarks.models_built import Sizes, llama

    torch.manual_seed(0)
    made = llama(Sizes(layers=2, heads=4, batch=2, tokens=24, vocab=64), torch.float32, "cpu")
    with torch.inference_mode():
        whole = made.output(made.module.eval())
        last = models._generation(made, TORCH, mode)()
    assert torch.allclose(last[:, 0], whole[:, -1], atol=1e-4)


def test_rounds_end_with_their_time(short: None, monkeypatch: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from benchmarks.models_built import Sizes

    sizes = Sizes(layers=1, heads=4, batch=2, tokens=24, vocab=64)

    def rounds_of(limit_s: float) -> int:
        options: dict[str, Any] = {"rounds": 4, "sizes": sizes, "time_limit_s": limit_s}
        ways = measure("flux", "eager", 1, "cpu", (TORCH, "enable"), **options)["ways"]
        assert len(ways[TORCH]["seconds_again"]) == len(ways["enable"]["seconds"])
        assert 0 < ways["enable"]["host_share"] <= 1
        assert ways["enable"]["over_torch"]["low"] <= ways["enable"]["over_torch"]["high"]
        return len(ways["enable"]["seconds"])

    assert rounds_of(1e9) == 4
    assert rounds_of(0.0) == 1


def test_training_computes_gradients(short: None) -> None:
    ways = built("flux", "training")["ways"]
    assert all(found["tokens_per_s"] > 0 and found["error"] < 0.02 for found in ways.values())
    assert sum(ways["attn_implementation"]["fallbacks"].values()) == 1


def test_what_a_model_raises_is_a_row(short: None, monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from benchmarks import models_built

    class Stubborn(torch.nn.Linear):
        def set_attn_implementation(self, name: str) -> None:
            raise ValueError(f"no {name} here\nand more")

    def build(sizes: Any, dtype: Any, device: str) -> Any:
        inputs = {"input": torch.randn(2, 8, dtype=dtype)}
        return models_built.Built(Stubborn(8, 8, dtype=dtype), inputs, 2)

    monkeypatch.setitem(models_built.BUILDS, "flux", build)
    ways = measure("flux", "eager", 1, "cpu")["ways"]
    assert ways["attn_implementation"] == {"failed": "no tuner here"}
    assert ways[TORCH]["tokens_per_s"] > 0


def test_names_agree() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from benchmarks.models_built import BUILDS

    assert tuple(BUILDS) == MODELS


def figures(speed: float, **changes: Any) -> dict[str, Any]:
    counts = {"calls": 1, "hits": 0, "selected": 0, "fallbacks": {}, "errors": {}}
    over = {"median": speed / 1000, "low": speed / 1000 - 0.02, "high": speed / 1000 + 0.03}
    figures = {"tokens_per_s": speed, "error": 1e-3, "over_torch": over, "host_share": 0.5}
    return {**counts, **figures, **changes}


def test_the_table_has_a_line_for_each_way() -> None:
    rows = [
        {
            "model": "llama",
            "mode": "eager",
            "layers": 5,
            "ways": {
                TORCH: figures(1000.0, error=0.0),
                "attn_implementation": figures(1200.0, hits=3, selected=1, fallbacks={"why": 1}),
                "enable": {"failed": "no registry"},
                LAYERS: figures(900.0, hits=9),
            },
        },
        {"model": "vit", "mode": "compiled", "lost": "no answer after 300 s"},
    ]
    lines = [line.split() for line in report(rows).splitlines()[2:]]
    assert len(lines) == 2 * len(WAYS)
    control = ["1000", "1.000", "0.980..1.030", "control", "0.50", "0.0e+00"]
    assert lines[0] == ["llama", "eager", "torch", "0", "0", "0", *control]
    own = ["1200", "1.200", "1.180..1.230", "faster", "0.50", "1.0e-03"]
    counts = ["3", "1", "1", "1"]
    assert lines[1] == ["llama", "eager", "attn_implementation", *counts, *own, "1", "why"]
    assert lines[2] == ["llama", "eager", "enable", "failed:", "no", "registry"]
    slower = ["900", "0.900", "0.880..0.930", "slower", "0.50", "1.0e-03"]
    assert lines[3] == ["llama", "eager", LAYERS, "9", "0", "0", *slower]
    assert all(line[-6:] == "failed: no answer after 300 s".split() for line in lines[4:])


@pytest.mark.parametrize("argv", [["--models", "gpt5"], ["--modes", "lazy"]])
def test_unknown_names_are_refused(argv: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    allowed = MODELS if "--models" in argv else MODES
    assert ", ".join(allowed) in " ".join(capsys.readouterr().err.split())
