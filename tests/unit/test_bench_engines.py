"""Answers that ``scripts/bench engines`` compares: tokens that part, bits of a request."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from bench_device import fake_device, fake_gpu  # noqa: F401
from bench_programs import Offline, engines, vllm  # noqa: F401
from bench_sglang import runner  # noqa: F401

from benchmarks.__main__ import main
from benchmarks.engines import in_turns
from benchmarks.engines_sglang import parting
from tuner.errors import BenchmarkError


@pytest.fixture
def printed(fake_device: None, capsys: Any) -> Any:  # noqa: F811
    def run(*arguments: str) -> str:
        main(["engines", *arguments, "--smoke"])
        return str(capsys.readouterr().out)

    return run


def test_the_first_token_that_differs_counts() -> None:
    own = {"tokens": [[1, 2, 3], [4, 5, 6], [7, 8, 9]], "gaps": [[0.1, 0.2, 0.3]] * 3}
    told = {"tokens": [[1, 2, 3], [4, 0, 0], [0, 8, 9]]}
    assert parting(told, own) == (2, 0.2)
    assert parting(own, own) == (0, 0.0)


def test_ways_of_another_preset_are_one_clear_line() -> None:
    with pytest.raises(BenchmarkError, match="none of the ways"):
        in_turns({}, Namespace(seconds=1.0, runs=1))


@pytest.mark.usefixtures("runner")
def test_tokens_of_a_runner_part_from_its_own(printed: Any) -> None:
    out = printed("--preset", "sglang", "--ways", "sglang", "tuner")
    assert "tiny, tuner: Runner" in out and out.count("requests part") == 1
    assert "3 of 3 requests part, gaps up to 0.5" in out


@pytest.mark.usefixtures("vllm")
def test_a_request_s_bits_are_compared_in_the_mode(
    printed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--preset", "vllm", "--ways", "vllm", "tuner mode"
    out = printed(*options)
    assert out.count("bits of a request") == 1
    assert "cached equal, first equal, amidst equal, last equal" in out
    generate = Offline.generate

    def other(self: Offline, prompts: Any, *given: Any, **named: Any) -> Any:
        outputs = generate(self, prompts, *given, **named)
        for output in outputs if len(prompts) > 100 else ():
            next(iter(output.outputs[0].logprobs[0].values())).logprob = -2.0
        return outputs

    monkeypatch.setattr(Offline, "generate", other)
    assert "cached equal, first differs, amidst differs, last differs" in printed(*options)


@pytest.mark.usefixtures("vllm")
def test_an_engine_that_is_lost_costs_its_own_rows(
    printed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.engines_servers import Vllm

    run = Vllm.run

    def lost(self: Vllm) -> Any:
        return {"lost": "no answer"} if self.way == "tuner" else run(self)

    monkeypatch.setattr(Vllm, "run", lost)
    out = printed("--preset", "vllm", "--ways", "vllm", "tuner", "--runs", "2")
    assert "- tiny, tuner: no answer" in out and "vllm 3: " in out
