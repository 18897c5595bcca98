"""Other projects' tests by forced kernels: shares, records, what is compared; on planted suites."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from living import benchmarks_environment, is_alive, pid_in, until_dead

torch = pytest.importorskip("torch", reason="torch is not installed")

from benchmarks import flash_attention_adapter, forced, suites  # noqa: E402
from benchmarks.suites_plugin import ALONE, BEGIN, END, FORCED, Share, append, last, read  # noqa: E402
from tuner.base.processes import python_command  # noqa: E402
from tuner.errors import BenchmarkError, ConfigError  # noqa: E402
from tuner.families import family  # noqa: E402
from tuner.hardware import DEFAULT_GPU  # noqa: E402
from tuner.measurement import Provenance  # noqa: E402
from tuner.problem import AttentionProblem, GemmProblem  # noqa: E402
from tuner.selection import portfolio  # noqa: E402
from tuner.selection.kernels import targets  # noqa: E402

TESTS = """
import os, pytest
from tuner.runtime.call import counters
forced = bool(os.environ.get("PLANTED"))
def test_served():
    if forced:
        counters.count_hit()
        counters.count_fallback("a mask: of some kind")
def test_wrong():
    if forced:
        counters.count_hit()
    assert not forced, "another result"
def test_fails_anyway():
    assert False
def test_fused_sdp_choice():
    assert not forced
def test_skipped():
    pytest.skip("no such GPU")
@pytest.fixture
def broken():
    yield
    raise RuntimeError("at the end")
def test_teardown(broken):
    pass
def test_unselected():
    assert False
"""
FORCING = "import os\ndef install(built_only):\n    os.environ['PLANTED'] = '1'\n"
#: Run when a child starts: the counters without the rest of the runtime, and torch's only question.
LIGHT = """
import pathlib, sys, types
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=bool))
import tuner
runtime = sys.modules["tuner.runtime"] = types.ModuleType("tuner.runtime")
runtime.__path__ = [str(pathlib.Path(tuner.__file__).parent / "runtime")]
from tuner.runtime.call.counters import stats
runtime.stats = stats
"""
LOST = """
import pathlib
here = pathlib.Path(__file__).with_name("runs")
def test_first():
    here.write_text(here.read_text() + "x" if here.exists() else "x")
def test_loses():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_last():
    pass
"""
ENDS = """
import os, pathlib, signal, time
here = pathlib.Path(__file__).with_name("runs")
def test_passes():
    here.write_text(here.read_text() + "x" if here.exists() else "x")
def test_crashes():
    os.kill(os.getpid(), signal.SIGSEGV)
def test_hangs():
    time.sleep(1000)
def test_passes_as_well():
    test_passes()
"""
HUNGRY = """
import pathlib
here = pathlib.Path(__file__).with_name("runs")
def test_hungry():
    if not here.exists():
        here.touch()
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
def test_small():
    pass
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> suites.Suite:
    """A suite of seven tests, and a module that forces nothing."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "planted_forcing.py").write_text(FORCING)
    (tmp_path / "modules" / "sitecustomize.py").write_text(LIGHT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    (tmp_path / "checkout" / "test").mkdir(parents=True)
    (tmp_path / "checkout" / "test" / "test_planted.py").write_text(TESTS)
    return suites.Suite(
        "planted",
        tmp_path / "checkout",
        "test/test_planted.py",
        "not unselected",
        forcing="planted_forcing",
    )


def runner(
    tmp_path: Path, processes: int = 1, limit_s: float = 300, test_limit_s: float = 200
) -> suites.Runner:
    deadline = time.monotonic() + limit_s
    return suites.Runner(tmp_path / "work", processes, deadline, test_limit_s=test_limit_s)


def names(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [row["id"].rpartition("::")[2] for row in rows]


def test_a_suite_in_both_modes(planted: suites.Suite, tmp_path: Path) -> None:
    document = suites.run_suites([planted], runner(tmp_path))
    found = document["suites"]["planted"]
    assert found["tests"] == 6
    assert found["alone"] == {"passed": 3, "failed": 2, "skipped": 1}
    assert found["forced"] == {"passed": 1, "failed": 4, "skipped": 1}
    assert names(found["new_failures"]) == ["test_wrong"]
    assert "another result" in found["new_failures"][0]["message"]
    assert names(found["expected_failures"]) == ["test_fused_sdp_choice"]
    assert found["expected_failures"][0]["reason"] == "asserts which backend answers"
    assert (found["hits"], found["tests_with_hits"]) == (2, 2)
    assert found["fallbacks"] == {"a mask": 1}
    assert found["skipped"] == {"Skipped: no such GPU": 1}
    assert [row["id"].rpartition("::")[2] for row in found["failures_of_both"]] == [
        *("test_fails_anyway", "test_teardown"),
    ]
    assert found["not_run"] == []
    assert json.loads(json.dumps(document))["suites"]["planted"]["options"]["sample"] == 1.0
    text = suites.text_of("planted", found)
    assert "failures that PyTorch alone does not have: 1\n    test_planted.py::test_wrong (" in text
    assert "in both modes: 2\n    test_planted.py::test_fails_anyway (" in text


def test_what_was_run_is_not_run_again(planted: suites.Suite, tmp_path: Path) -> None:
    """Not even the tests before the one that lost the CUDA context."""
    planted.path.write_text(LOST)
    (found,) = runner(tmp_path).run(planted, [ALONE])
    outcomes = {name.rpartition("::")[2]: row["outcome"] for name, row in found.items()}
    assert outcomes == {"test_first": "passed", "test_loses": "failed", "test_last": "passed"}
    assert runner(tmp_path).run(planted, [ALONE]) == [found]
    assert planted.path.with_name("runs").read_text() == "x"
    (record,) = (tmp_path / "work").glob("*.jsonl")
    assert END in last(record)


def test_what_ends_its_process_or_does_not_end_has_failed(
    planted: suites.Suite, tmp_path: Path
) -> None:
    """The share goes on behind it, and none of its other tests is run twice."""
    planted.path.write_text(ENDS)
    (found,) = runner(tmp_path, test_limit_s=10).run(planted, [ALONE])
    told = {
        name.rpartition("::")[2]: (row["outcome"], row["message"]) for name, row in found.items()
    }
    assert told == {
        "test_crashes": ("failed", f"its process ended: {-signal.SIGSEGV}"),
        "test_hangs": ("failed", "no end in 10 s"),
        "test_passes": ("passed", ""),
        "test_passes_as_well": ("passed", ""),
    }
    assert planted.path.with_name("runs").read_text() == "xx"


#: A bench of a planted suite whose test notes its process and does not end.
KILLED = """
import sys, time
from pathlib import Path
from benchmarks import suites
folder = Path(sys.argv[1])
suite = suites.Suite("planted", folder / "checkout", "test/test_planted.py", "")
suites.Runner(folder / "work", 1, time.monotonic() + 300, test_limit_s=200).run(suite, ["alone"])
"""
NOTES = """
import os, pathlib, time
def test_hangs():
    note = pathlib.Path(__file__).with_name("note")
    note.write_text(str(os.getpid()))
    note.rename(note.with_name("pid"))
    time.sleep(1000)
"""


def test_tests_end_with_a_bench_that_is_killed(planted: suites.Suite, tmp_path: Path) -> None:
    planted.path.write_text(NOTES)
    command = python_command("-c", KILLED, str(tmp_path))
    with subprocess.Popen(command, env=benchmarks_environment()) as bench:
        try:
            child = pid_in(planted.path.with_name("pid"))
            assert is_alive(child)
        finally:
            bench.kill()
    until_dead(child)


def test_what_ran_out_of_memory_is_run_again(planted: suites.Suite, tmp_path: Path) -> None:
    """Beside other processes; what runs out of it by itself as well leaves its share broken."""
    planted.path.write_text(HUNGRY)
    (found,) = (made := runner(tmp_path)).run(planted, [ALONE])
    assert names(list(found.values())) == ["test_small", "test_hungry"]
    assert {row["outcome"] for row in found.values()} == {"passed"} and not made.broken
    planted.path.write_text(HUNGRY.replace("not here.exists()", "True"))
    made = suites.Runner(tmp_path / "other", 1, time.monotonic() + 300)
    (found,) = made.run(planted, [ALONE])
    assert names(list(found.values())) == ["test_small"]
    assert list(made.broken) == ["planted-alone-0-of-1"]


def test_a_broken_share_leaves_the_others(planted: suites.Suite, tmp_path: Path) -> None:
    other = replace(planted, name="other", file="test/test_other.py", keyword="")
    other.path.write_text("import no_such_module\n")
    document = suites.run_suites([planted, other], made := runner(tmp_path))
    assert names(document["suites"]["planted"]["new_failures"]) == ["test_wrong"]
    assert document["broken"] == made.broken
    assert {"other-alone-0-of-1", "other-forced-0-of-1"} <= set(made.broken)
    assert "no_such_module" in made.broken["other-alone-0-of-1"]


def test_a_test_that_was_ended_by_the_limit_has_not_failed(
    planted: suites.Suite, tmp_path: Path
) -> None:
    """Not even where the process that goes on ends before its first test."""
    made = runner(tmp_path)
    (share,) = made._shares(planted, ALONE)
    (tmp_path / "work").mkdir()
    append(Path(share.record), {BEGIN: "test_planted.py::test_served"})
    planted.path.write_text("import no_such_module\n")
    with pytest.raises(BenchmarkError, match="no_such_module"):
        made.run(planted, [ALONE])
    assert read(Path(share.record)) == {}


def test_a_suite_that_cannot_be_imported_says_why(planted: suites.Suite, tmp_path: Path) -> None:
    planted.path.write_text("import no_such_module\n")
    with pytest.raises(BenchmarkError, match="no_such_module"):
        runner(tmp_path).run(replace(planted, keyword=""))


def test_nothing_is_started_after_the_deadline(planted: suites.Suite, tmp_path: Path) -> None:
    assert runner(tmp_path, limit_s=-1).run(planted, [ALONE]) == [{}]


def test_every_test_belongs_to_one_share() -> None:
    tests = [f"test_flash_attn.py::test_output[{n}]" for n in range(2000)]
    shares = [Share(ALONE, "r", number, 4, sample=0.25) for number in range(4)]
    owners = [[share.number for share in shares if share.wants(name)] for name in tests]
    assert {len(found) for found in owners} == {0, 1}
    assert 400 < sum(map(len, owners)) < 600, "a quarter"
    assert all(any(share.number in found for found in owners) for share in shares)
    other = Share(FORCED, "s", sample=0.25)
    assert [other.wants(name) for name in tests] == [bool(found) for found in owners]


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    record = tmp_path / "r.jsonl"
    record.write_text('{"id": "a", "outcome": "passed"}\n{"id": "b", "ou')
    assert list(read(record)) == ["a"]
    assert last(record) == {}
    append(record, {"id": "c"})
    assert list(read(record)) == ["a", "c"]
    assert last(record) == {"id": "c"}


def test_a_package_that_its_tests_import_is_named(planted: suites.Suite) -> None:
    planted.check()
    with pytest.raises(ConfigError, match=r"needs no_such: `.* -m pip install no_such`"):
        replace(planted, needs="no_such").check()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "name a checkout"),
        (["--pytorch", "nowhere"], "a checkout with test/test_transformers.py"),
        (["--flash-attention", "nowhere"], "a checkout with tests/test_flash_attn.py"),
        (["--pytorch", "x", "--processes", "0"], "--processes must be 1 or more"),
        (["--flash-attention", "x", "--sample", "2"], "samples above 0 and at most 1"),
        (["--pytorch", "x", "--test-limit", "0"], "--test-limit must be above 0 seconds"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        suites.main(arguments)


class Compiler:
    """Has every kernel already."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def submit(self, specs: Sequence[Any], owner: Any = None) -> list[Any]:
        self.asked += specs
        made = SimpleNamespace(result=lambda: SimpleNamespace(key="0" * 32))
        return [(spec, made) for spec in specs]


class TestForced:
    @pytest.fixture
    def compiler(self) -> Compiler:
        return Compiler()

    @pytest.fixture
    def made(self, compiler: Compiler) -> forced.Forced:
        return forced.Forced(compiler, DEFAULT_GPU)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "shape",
        [
            "S=3,D=8,H=2",
            "SQ=1,SKV=4096,D=128,H=32,HKV=8",
            "S=1025,D=160,causal=1,dtype=bf16",
            "SQ=113,SKV=203,D=64,left=5,right=7",
            "S=100,D=256,softcap=50",
            "S=100,D=64,varlen=1,B=3",
            "S=128,D=64,bias=bh",
        ],
    )
    def test_a_legal_config_in_the_place_of_a_decision(
        self, made: forced.Forced, shape: str
    ) -> None:
        problem = AttentionProblem.parse(shape)
        answer = made.lookup(problem, gpu=DEFAULT_GPU, path=None, with_portfolio=False)
        assert answer is not None
        assert (answer.kind, answer.exact) == ("exact", True)
        (measurement,) = answer.candidates
        assert measurement.problem == problem
        assert measurement.provenance is Provenance.MEASURED and measurement.ok
        member = family(measurement.config.family)
        assert member.violations(problem, measurement.config, DEFAULT_GPU) == []
        assert set(measurement.artifacts) == set(member.kernels(problem, measurement.config))

    def test_kernels_are_the_portfolio_s(self, made: forced.Forced, compiler: Compiler) -> None:
        known = next(one for one in portfolio.shipped() if one.op == "attention")
        shipped = {spec for each in targets(known) for spec in each.kernels.values()}
        for seqlen in (128, 143, 256, 1024, 2048):
            made.lookup(AttentionProblem.parse(f"S={seqlen},D=64"))
        assert {*compiler.asked} <= shipped

    def test_other_domains_lengths_share_a_kernel(
        self, made: forced.Forced, compiler: Compiler
    ) -> None:
        for seqlen in (128, 143, 256, 1024, 2048):
            made.lookup(AttentionProblem.parse(f"S={seqlen},D=192,bias=h"))
        assert len({*compiler.asked}) == 1

    def test_a_problem_is_compiled_for_once(self, made: forced.Forced, compiler: Compiler) -> None:
        problem = AttentionProblem.parse("S=128,D=64")
        assert made.lookup(problem) is made.lookup(problem)
        assert len(compiler.asked) == len({*compiler.asked})

    def test_what_no_family_takes_is_pytorchs(self, made: forced.Forced) -> None:
        assert made.lookup(GemmProblem(128, 128, 64)) is None
        assert made.lookup(AttentionProblem.parse("S=128,D=64,alibi=1,left=3")) is None

    def test_the_usual_kernels_are_compiled_at_once(
        self, made: forced.Forced, compiler: Compiler
    ) -> None:
        assert made.compile_usual() == len({*compiler.asked}) > len(forced.HEAD_DIMS)

    def test_the_runtime_asks_it(
        self,
        on_cpu: SimpleNamespace,
        made: forced.Forced,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The only thing that is put in place: everything behind the look-up is the runtime's."""
        table = importlib.import_module("tuner.runtime.call.table")
        monkeypatch.setattr(table, "lookup", table.lookup)  # put back at the end
        monkeypatch.setattr(forced, "made", lambda families, built_only: made)
        monkeypatch.setattr("tuner.enable", lambda: None)
        forced.install()
        import tuner

        q = torch.randn(1, 2, 16, 64).half()
        tuner.attention(q, q, q)
        (reason,) = tuner.stats().fallbacks
        assert reason.startswith("nothing of the entry can run here"), "no such artifact on a CPU"


class TestFlashAttention:
    """The functions that stand in for FlashAttention's, answered by PyTorch on a CPU."""

    @pytest.fixture(autouse=True)
    def double(self) -> None:
        torch.manual_seed(0)

    def reference(self, q: Any, k: Any, v: Any, seen: Any) -> Any:
        scores = torch.einsum("bshd,bthd->bhst", q.float(), k.float()) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        return torch.einsum("bhst,bthd->bshd", weights, v.float())

    @pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 7), (7, 4)])
    @pytest.mark.parametrize("window", [(-1, -1), (2, 1), (3, -1)])
    @pytest.mark.parametrize("causal", [False, True])
    def test_masks_are_aligned_bottom_right(
        self, queries: int, keys: int, window: tuple[int, int], causal: bool
    ) -> None:
        q, k, v = (torch.randn(2, n, 3, 8) for n in (queries, keys, keys))
        distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
        left, right = window[0], 0 if causal else window[1]
        seen = (distance <= right) | (right < 0)
        seen &= (distance >= -left) | (left < 0)
        sides = tuple(torch.tensor(side) for side in window)
        out, _, mask = flash_attention_adapter.func(
            q, k, v, causal=causal, window_size=sides, return_attn_probs=True
        )
        assert mask is None
        torch.testing.assert_close(out, self.reference(q, k, v, seen))

    def test_packed_arguments(self) -> None:
        qkv = torch.randn(2, 5, 3, 2, 8)
        q, k, v = qkv.unbind(2)
        wanted = flash_attention_adapter.func(q, k, v)
        found = flash_attention_adapter.qkvpacked_func(qkv)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(flash_attention_adapter.kvpacked_func(q, qkv[:, :, 1:]), wanted)
        lengths = torch.tensor([0, 5, 10], dtype=torch.int32)
        packed = qkv.flatten(0, 1)
        found = flash_attention_adapter.varlen_qkvpacked_func(packed, lengths, 5)
        torch.testing.assert_close(found, wanted.flatten(0, 1))
        found = flash_attention_adapter.varlen_kvpacked_func(
            packed[:, 0], packed[:, 1:], lengths, lengths, 5, 5
        )
        torch.testing.assert_close(found, wanted.flatten(0, 1))

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"dropout_p": 0.17}, "dropout"),
            ({"alibi_slopes": torch.ones(2)}, "ALiBi"),
        ],
    )
    def test_what_the_runtime_lacks_is_skipped_by_name(
        self, options: dict[str, Any], why: str
    ) -> None:
        q = torch.randn(1, 4, 2, 8)
        with pytest.raises(pytest.skip.Exception, match=why):
            flash_attention_adapter.func(q, q, q, **options)

    def test_its_package_is_found_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn" / "bert_padding.py").write_text("def pad_input():\n    return 1\n")
        import sys

        before = dict(sys.modules)
        try:
            flash_attention_adapter.install(tmp_path)
            from flash_attn import flash_attn_func
            from flash_attn.bert_padding import pad_input
            from flash_attn.flash_attn_interface import USE_TRITON_ROCM

            assert flash_attn_func is flash_attention_adapter.func
            assert (pad_input(), USE_TRITON_ROCM) == (1, False)
        finally:
            for name in sys.modules.keys() - before.keys():
                del sys.modules[name]
            sys.modules.update(before)
