"""SGLang's real classes over CPU tensors, with PyTorch's operations in a tuned kernel's place.

Prints one JSON object. `lines` were logged. `choices` are SGLang's options that name the plug-in.
`errors` are each case's largest difference from SGLang's own reference. `methods` are those of
layers in bf16 and in fp8. Needs `engine_unpacked`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import logging
import tomllib
import unittest
from pathlib import Path
from typing import Any

import engine_unpacked  # noqa: F401  (makes SGLang importable)
import torch

GROUP = "sglang.srt.plugins"
SRT = "sglang.srt"
HARNESS = "sglang.test.kits.attention_unittest.attention_methods.dense_attention"
_entry_points = importlib.metadata.entry_points


def own_entry_point(**chosen: Any) -> Any:
    """This package's entry point as the only one of SGLang's group."""
    if chosen.get("group") != GROUP:
        return _entry_points(**chosen)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    named = project["entry-points"][GROUP].items()
    return [importlib.metadata.EntryPoint(name, value, GROUP) for name, value in named]


def choices() -> dict[str, Any]:
    """SGLang's options, read as from its command line."""
    server_args = importlib.import_module(f"{SRT}.server_args")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    line = ["--model-path", "m", "--attention-backend", "tuner", "--quantization", "tuner"]
    given = parser.parse_args(line)
    pipeline = importlib.import_module(f"{SRT}.arg_groups.pipeline")
    vars(importlib.import_module(f"{SRT}.arg_groups.overrides"))["use_mla_backend"] = lambda _: (
        False
    )
    registry = importlib.import_module(f"{SRT}.layers.attention.attention_registry")
    quantization = importlib.import_module(f"{SRT}.layers.quantization")
    return {
        "attention_backend": given.attention_backend,
        "page_size": pipeline._page_size_default(server_args.ServerArgs.from_cli_args(given)),
        "quantization": given.quantization,
        "created_by": registry.ATTENTION_BACKENDS["tuner"].__module__,
        "config": quantization.get_quantization_config("tuner").__module__,
    }


def composed_calls() -> list[str]:
    """Have PyTorch's operations compute what a tuned kernel would; returns the problems."""
    backend = importlib.import_module("tuner.runtime.engines.sglang.backend")
    calls = importlib.import_module("tuner.runtime.engines.calls")
    paged = importlib.import_module("tuner.runtime.attention.paged_composed")
    served: list[str] = []

    def run(step: Any, form: Any, kind: Any, query: Any, cache: Any, out: Any) -> bool:
        call = calls._call(step, form, query, *form.layout.pages(*cache))
        served.append(call.pose().problem.label())
        out.copy_(paged.composed(call)[0])
        return True

    vars(backend)["run"] = run
    return served


def cases(harness: Any) -> list[Any]:
    """SGLang's own cases with pages of 16 slots or more, windows, and drafts to verify."""
    modes = importlib.import_module(f"{SRT}.model_executor.forward_batch_info").ForwardMode
    plain = [case for case in harness.make_dense_cases("tuner") if case.page_size > 1]
    windows = [
        *harness.make_swa_no_prefix_input_config_cases("tuner"),
        *harness.make_swa_prefix_input_config_cases("tuner"),
    ]
    [(decode, extend)] = [(plain[-2], plain[-1])]
    drafts = dataclasses.replace(
        extend, name="drafts", forward_mode=modes.TARGET_VERIFY, prefix_lens=(20, 3),
        extend_lens=(4, 4),
    )  # fmt: skip
    window = dataclasses.replace(decode, name="window_decode", sliding_window_size=4)
    return [*plain, *windows, window, drafts]


@contextlib.contextmanager
def a_hopper() -> Any:
    """SGLang's harness on a machine that looks like an H100; windows do not make chunks of it."""
    for name in ("attention_registry", "flashattention_backend"):
        module = importlib.import_module(f"{SRT}.layers.attention.{name}")
        module.get_device_capability = lambda *_: (9, 0)  # type: ignore[attr-defined]
    harness = importlib.import_module(HARNESS)
    config = harness.TinyModelConfig
    init = config.__init__

    def plain(self: Any, **options: Any) -> None:
        init(self, **options)
        self.is_local_attention_model = False

    config.__init__ = plain
    vars(harness)["_SWA_DECODE_EXTEND_WINDOW"] |= {"tuner"}
    yield harness
    config.__init__ = init


def errors() -> dict[str, float]:
    """Differences by case; a case that SGLang's own kernel answered is minus one."""
    served, found = composed_calls(), {}
    with a_hopper() as harness, torch.no_grad():
        for case in cases(harness):
            before = len(served)
            built = {"device": "cpu", "dtype": torch.bfloat16}
            fixture = harness.build_dense_attention_fixture(unittest.TestCase(), case, **built)
            batch = fixture.forward_batch
            if case.forward_mode.is_target_verify():  # lengths without the drafts
                batch.seq_lens = batch.seq_lens - 4
                batch.seq_lens_cpu = batch.seq_lens_cpu - 4
            try:
                out = harness.run_dense_fixture_eager(fixture)
            except NotImplementedError:  # SGLang's own kernels need a GPU
                assert len(served) == before, case.name
                found[case.name] = -1.0
                continue
            wanted = harness.expected_dense_fixture_output(fixture)
            is_served = len(served) > before
            found[case.name] = (out - wanted).abs().max().item() if is_served else -1.0
    return found


def methods() -> list[str]:
    """Classes of methods of SGLang's own layers."""
    config = importlib.import_module(f"{SRT}.layers.quantization").get_quantization_config("tuner")
    blocks = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    linear = importlib.import_module(f"{SRT}.layers.linear").LinearBase
    products = importlib.import_module("tuner.runtime.engines.sglang.products")
    layer = linear.__new__(linear)
    chosen = [
        type(of_model.get_quant_method(layer, "layer")).__name__
        for of_model in (config(), config.from_config(blocks))
    ]
    assert issubclass(products.SglangFp8ExpertsMethod, products.Fp8MoEMethod)
    return [*chosen, str(config.override_quantization_method(blocks, "tuner"))]


def main() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tuner.runtime").addHandler(handler)
    importlib.metadata.entry_points = own_entry_point
    importlib.import_module(f"{SRT}.plugins").load_plugins()
    found: dict[str, Any] = {"lines": lines}
    if not lines:
        found |= {"choices": choices(), "errors": errors(), "methods": methods()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
