"""`tune_linear_`: what it changes, what it leaves alone, what it writes down, and the way back."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tuner
from tuner.errors import ConfigError, StoreError, TunerError
from tuner.problem import GemmProblem, Problem
from tuner.tuning.job import read_problems

torch = pytest.importorskip("torch", reason="torch is not installed")
nn = torch.nn

from tuner.runtime import layers  # noqa: E402  (needs torch)
from tuner.runtime.layers import TunedLinear  # noqa: E402

X = torch.randn(2, 4, 32).half()


class Block(nn.Module):
    """Linear layers nested, shared under two names, with and without a bias, and tied."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.inner = nn.Sequential(nn.GELU(), nn.Linear(64, 32, bias=False))
        self.again = self.inner[1]
        self.embedding = nn.Embedding(48, 32)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return self.head(self.norm(self.inner(self.up(x))) * scale)


def block() -> Any:
    made = Block().half().eval()
    made.up.train()  # one flag unlike the others
    return made


def problem(m: int, n: int, k: int, epilogue: str = "") -> GemmProblem:
    return GemmProblem(m, n, k, epilogue=epilogue)


UP, DOWN, HEAD = problem(8, 64, 32, "bias"), problem(8, 32, 64), problem(8, 48, 32)


def problems(zeros: SimpleNamespace) -> list[Problem]:
    """Those that tuned kernels served."""
    return [posed.problem for posed in zeros.posed]


def state(model: Any) -> dict[str, Any]:
    """All that the way back must bring back: objects by identity, values by copies."""
    return {
        "modules": [(name, id(m), type(m), m.training) for name, m in model.named_modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "hooks": [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()],
        "parameters": [(name, id(p)) for name, p in model.named_parameters()],
        "keys": list(model.state_dict()),
        "values": [t.clone() for t in model.state_dict().values()],
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    values = zip(one["values"], other["values"], strict=True)
    plain = ({k: v for k, v in each.items() if k != "values"} for each in (one, other))
    return next(plain) == next(plain) and all(torch.equal(*pair) for pair in values)


def test_layers_call_the_tuner_and_come_back_bit_by_bit(zeros: SimpleNamespace) -> None:
    model = block()
    model.up.register_forward_hook(lambda *_: None)
    before, plain = state(model), model(X)
    done = tuner.tune_linear_(model)
    assert done.replaced == ("up", "inner.1", "head") and done.left == {}
    assert model.again is model.inner[1] and model.head.weight is model.embedding.weight
    after = state(model)
    assert (after["keys"], after["parameters"]) == (before["keys"], before["parameters"])
    with torch.no_grad():
        assert not model(X).any() and problems(zeros) == [UP, DOWN, HEAD]
        assert tuner.tune_linear_(model).replaced == (), "a second call finds nothing to do"
        assert tuner.restore_linear_(model) == done.replaced
        assert torch.equal(model(X), plain) and len(zeros.posed) == 3
    assert same(state(model), before)
    assert tuner.restore_linear_(model) == ()


def test_a_layer_by_itself(zeros: SimpleNamespace) -> None:
    model = nn.Linear(32, 64).half()
    assert tuner.tune_linear_(model).replaced == ("",)
    with torch.no_grad():
        model(X)
    assert problems(zeros) == [UP] and isinstance(model, nn.Linear)
    assert tuner.restore_linear_(model) == ("",) and type(model) is nn.Linear


def test_what_no_kernel_serves_is_pytorch_s(on_cpu: SimpleNamespace) -> None:
    model = block()
    with torch.no_grad():
        plain = model(X)
        tuner.tune_linear_(model)
        assert torch.equal(model(X), plain)
    assert on_cpu.counters.stats(reset=True).fallbacks == {"no measured winner": 3}
    x = X.clone().requires_grad_()
    model.train()(x).sum().backward()
    assert x.grad is not None and model.up.weight.grad is not None


def test_autocast_is_pytorch_s(zeros: SimpleNamespace) -> None:
    model, x = nn.Linear(32, 64).half(), X[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        done = tuner.tune_linear_(model, [x])
        out = model(x)
    assert torch.equal(out, plain) and out.dtype == torch.bfloat16 and zeros.posed == []
    assert not done.calls.problems
    assert done.calls.others == {"autocast wants another type than the tensors'": 1}


def test_the_problems_that_layers_really_run_are_written_for_a_sweep(
    zeros: SimpleNamespace, tmp_path: Path
) -> None:
    model, file = block(), tmp_path / "problems.json"
    before = state(model)
    examples = [X, (X[:1],), {"x": X, "scale": 0.5}]
    done = tuner.tune_linear_(model, examples, problems=file)
    small = [problem(4, 64, 32, "bias"), problem(4, 32, 64), problem(4, 48, 32)]
    assert done.calls.problems == {UP: 2, DOWN: 2, HEAD: 2, **dict.fromkeys(small, 1)}
    assert read_problems(file) == list(done.calls.problems)
    assert zeros.posed == [], "examples run before layers are replaced"
    with torch.no_grad():
        for x in (X, X[:1]):
            model(x)
    assert problems(zeros) == list(done.calls.problems), "what is written down is what is asked for"
    tuner.restore_linear_(model)
    assert same(state(model), before), "flags, hooks and running statistics"


def test_a_caller_s_own_runs_are_watched_in_either_state() -> None:
    model = block()
    for change in (tuner.tune_linear_, tuner.restore_linear_):
        with tuner.linear_problems(model) as calls:
            model(X)
            model.up(input=X.float()[0, 0].half())
        assert list(calls.problems) == [UP, DOWN, HEAD]
        assert calls.others == {"they are not matrices, or are empty": 1}
        model(X)
        assert calls.problems.total() == 3, "nobody watches any more"
        change(model)


def test_problems_are_those_of_a_gpu_wherever_the_model_is(tmp_path: Path) -> None:
    model = Block().to(device="meta", dtype=torch.bfloat16)
    done = tuner.tune_linear_(model, [X.to(device="meta", dtype=torch.bfloat16)])
    first, *_ = done.calls.problems
    assert first.label() == "M=8,N=64,K=32,dtype=bf16,epilogue=bias"
    done = tuner.tune_linear_(nn.Linear(32, 64), [X.float()], problems=tmp_path / "none.json")
    assert done.calls.others == {"torch.float32 is not tuned (fp16 and bf16 are)": 1}
    assert (tmp_path / "none.json").read_text() == "[]\n"


def test_layers_of_other_kinds_are_left_alone_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from torch.nn.utils import prune

    class Own(nn.Linear):
        pass

    class Quantised(nn.Module):
        in_features, out_features = 32, 64

    class Stored(torch.Tensor):
        pass

    model = nn.ModuleDict(
        {name: nn.Linear(32, 64) for name in ("plain", "para", "pruned", "moved", "stored")}
    )
    model.update({"own": Own(32, 64), "quantised": Quantised()})
    nn.utils.parametrizations.weight_norm(model["para"])
    prune.identity(model["pruned"], "bias")
    model["moved"].forward = model["moved"].forward
    model["stored"].weight = nn.Parameter(torch.randn(64, 32).as_subclass(Stored))
    model["attention"] = nn.MultiheadAttention(32, 2)
    before = state(model)
    done = tuner.tune_linear_(model)
    assert done.replaced == ("plain",)
    here = f"{__name__}.{test_layers_of_other_kinds_are_left_alone_and_told.__name__}.<locals>"
    assert done.left == {
        "para": "it is parametrised",
        "pruned": "its bias is computed before each call",
        "moved": "its forward was replaced",
        "stored": "its weight is a Stored",
        "own": f"it is a {here}.Own",
        "quantised": f"it is a {here}.Quantised",
        "attention.out_proj": "it is a torch.nn.modules.linear.NonDynamicallyQuantizableLinear",
    }
    assert "tune_linear_ leaves moved alone: its forward was replaced" in caplog.messages
    tuner.restore_linear_(model)
    assert same(state(model), before)


def test_an_error_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = block()
    before = state(model)
    with pytest.raises(RuntimeError):
        tuner.tune_linear_(model, [X, X[..., :5]])
    with pytest.raises(StoreError, match="cannot be written"):
        tuner.tune_linear_(model, [X], problems=tmp_path / "no" / "folder.json")
    with pytest.raises(ConfigError, match=r"examples is one Tensor \(allowed: a list"):
        tuner.tune_linear_(model, X)
    with pytest.raises(ConfigError, match="needs examples"):
        tuner.tune_linear_(model, problems=tmp_path / "p.json")

    assert same(state(model), before)

    class Stubborn(nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "__class__":
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    with pytest.raises(KeyboardInterrupt):
        layers._change(dict.fromkeys([model.up, model.head, Stubborn(1, 1)], TunedLinear))
    assert same(state(model), before), "interrupted in the middle"


def test_the_way_back_refuses_what_something_else_holds() -> None:
    model = block()
    tuner.tune_linear_(model)
    nn.utils.parametrizations.weight_norm(model.inner[1])
    with pytest.raises(TunerError, match=r"inner\.1 cannot be restored: it is parametrised"):
        tuner.restore_linear_(model)
    assert type(model.up) is TunedLinear
    nn.utils.parametrize.remove_parametrizations(model.inner[1], "weight")
    assert tuner.restore_linear_(model) == ("up", "inner.1", "head")


def test_copies_and_files_keep_what_they_were_made_of() -> None:
    model = block()
    saved = copy.deepcopy(model.state_dict())
    tuner.tune_linear_(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other.up) is TunedLinear and other.up is not model.up
        assert torch.equal(other(X), model(X))
        assert tuner.restore_linear_(other) == ("up", "inner.1", "head")
    assert type(model.up) is TunedLinear
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = block()
    plain.load_state_dict(torch.load(file, weights_only=True))
    model.load_state_dict(saved)
    assert torch.equal(plain(X), model(X))
    weight = model.up.weight
    assert model.float().up.weight is weight and weight.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*found no compiled frames")  # torch 2.12's, in a mode
def test_what_was_compiled_follows(on_cpu: SimpleNamespace) -> None:
    torch.compiler.reset()
    model = block()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        plain = model(X)
        assert torch.equal(compiled(X), plain)
        done = tuner.tune_linear_(compiled, [X])
        assert list(done.calls.problems) == [UP, DOWN, HEAD], "though a graph was there before"
        assert done.replaced == ("_orig_mod.up", "_orig_mod.inner.1", "_orig_mod.head")
        assert torch.equal(compiled(X), plain) and torch.equal(model(X), plain)
        tuner.restore_linear_(compiled)
        assert torch.equal(compiled(X), plain)
        alone = torch.compile(nn.Linear(32, 8), backend="eager")
        assert tuner.tune_linear_(alone).left == {}
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")  # of two kinds, by version
def test_what_is_traced_holds_no_kernel_s_output(zeros: SimpleNamespace) -> None:
    model = nn.Linear(32, 64).half()
    tuner.tune_linear_(model)
    with torch.no_grad():
        traced = torch.jit.trace(model, X, check_trace=False)
        tuner.restore_linear_(model)
        assert torch.equal(traced(X + 1), model(X + 1)) and zeros.posed == []
