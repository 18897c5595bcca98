"""Sweeps of one problem side by side: what is timed again, and what is said of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import repeats
from tuner.bench.results import write_json
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import families
from tuner.hardware import DEFAULT_GPU
from tuner.measure import device
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem
from tuner.tuning.job import JobOptions, JobResult
from tuner.tuning.outcome import Outcome

PROBLEM = AttentionProblem.parse("S=512,D=64")
OWN = [Config("fused_attention", {"tile_n": n}) for n in (64, 128)]
CUDNN = Config("vendor_sdpa", {"kernel": "cudnn"})


def measured(config: Config, us: float) -> Measurement:
    return Measurement(
        PROBLEM, config, DEFAULT_GPU, Regime(), Status.OK, latency_us=us, is_final=True
    )


def outcome(us: dict[Config, float]) -> Outcome:
    ranking = tuple(measured(config, time) for config, time in us.items())
    return Outcome(
        PROBLEM, DEFAULT_GPU, Regime(), Environment({}), Provenance.MEASURED, "s", ranking,
        candidates=40, kernels=13, resumed=0, failures={}, unavailable={}, interrupted=False,
        elapsed_s=2.0,
    )  # fmt: skip


class Retiming:
    """Answers a pass with scripted times, and notes what was asked of it."""

    gpu, regime, environment, compiles = DEFAULT_GPU, Regime(), Environment({}), 16

    def __init__(self, us: dict[Config, float]) -> None:
        self.us = us
        self.asked: list[tuple[list[Config], int]] = []

    def retime(self, problem: Any, finalists: list[Config], rounds: int) -> list[Measurement]:
        self.asked.append((list(finalists), rounds))
        return [
            measured(config, self.us[config]) if config in self.us else failed(config)
            for config in finalists
        ]


def failed(config: Config) -> Measurement:
    return replace(measured(config, 1.0), status=Status.LAUNCH_ERROR, latency_us=None, log="gone")


def swept(config: Config, us: float, **facts: float) -> repeats.Swept:
    return repeats.Swept(config, us, 13, 2.0, facts)


def test_each_winner_is_timed_once_and_each_sweep_judged_by_it() -> None:
    sweeps = [swept(OWN[0], 5.0), swept(OWN[1], 5.1, first_answer_s=20.0, process_s=44.0)]
    runner: Any = Retiming({OWN[0]: 5.0, OWN[1]: 5.1})
    found = repeats.compared(PROBLEM, runner, [*sweeps, sweeps[0]], rounds=7)
    assert runner.asked == [([OWN[0], OWN[1]], 7)]
    assert [sweep["over_best"] for sweep in found["sweeps"]] == [1.0, 1.02, 1.0]
    assert found["worst_over_best"] == 1.02
    *lines, last = repeats.text(found).splitlines()
    assert (
        len(lines) == 3 and "13 sets of kernels in 2 s, 44 s of a process, first 20 s" in lines[1]
    )
    assert last.startswith("3 sweeps, 2 winners, the worst 1.0200 of the best")


def test_recorded_kernels_beside_count_where_they_pass() -> None:
    runner: Any = Retiming({OWN[0]: 5.0, OWN[1]: 4.0})
    found = repeats.compared(PROBLEM, runner, [swept(OWN[0], 5.0)], [OWN[1], OWN[0], CUDNN])
    assert runner.asked == [([OWN[0], OWN[1], CUDNN], repeats.ROUNDS)]
    assert found["worst_over_best"] == 1.25
    assert [one["us"] for one in found["beside"]] == [4.0, None]


def test_recorded_kernels_are_the_fastest_ones_of_different_code() -> None:
    problem = AttentionProblem.parse("S=1024,D=64")
    found = repeats.recorded(problem, DEFAULT_GPU, 4)
    assert len({families()[c.family].compile_digest(c) for c in found}) == 4
    assert repeats.recorded(AttentionProblem.parse("S=1000,D=64"), DEFAULT_GPU, 4) == []


def test_a_winner_that_fails_is_no_result() -> None:
    runner: Any = Retiming({})
    with pytest.raises(BenchmarkError, match="failed: gone"):
        repeats.compared(PROBLEM, runner, [swept(OWN[0], 5.0)])


TUNER = """
import json, os, sys, time
print("the first answer: 11.4 us verified after 17.2 s, provisional", file=sys.stderr)
folder = os.environ["TUNER_CACHE_DIR"] + "/artifacts/"
known = os.listdir(folder) if os.path.isdir(folder) else []
facts = {"template": "attention.cu.j2"}
name = "4567" if "0123" in known else "0123"
os.makedirs(folder + name)
json.dump({"compile_cpu_s": 20.5, "facts": facts}, open(f"{folder}{name}/meta.json", "w"))
open(f"{folder}{name}/kernel.cu", "w").close()
if sys.argv[sys.argv.index("--seed") + 1] == "9":
    sys.exit("tuner: no candidate passed")
own = {"config": {"family": "fused_attention", "params": {"tile_n": 64}}, "latency_us": 11.4}
found = {"best_own": own, "kernels": 16, "elapsed_s": 43.2, "given_up": 3, "own_over_vendor": {}}
found |= {"seconds": {"search": 40.0}, "expected_loss": 0.001, "known": known, "ranking": [own]}
print("known:", *known, file=sys.stderr)
print(json.dumps(found))
"""


def test_a_sweep_with_an_empty_cache_is_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    command = lambda *arguments: [sys.executable, "-c", TUNER, *arguments]  # noqa: E731
    monkeypatch.setattr(repeats, "python_command", command)
    found = repeats.swept_anew(PROBLEM, 3, ["--device=0"])
    assert (found.winner, found.own_us, found.kernels) == (OWN[0], 11.4, 16)
    assert found.facts["first_answer_s"] >= 0 and found.facts["process_s"] < 60
    assert (found.facts["compiled"], found.facts["compile_cpu_s"]) == (1, 20.5)
    assert found.facts["cpu_s_a_kernel"] == {"attention.cu.j2": 20.5}
    assert len(found.facts["compiled_after_s"]) == 1
    assert found.facts["seconds"] == {"search": 40.0}
    assert found.facts["finals_us"] == {f"fused_attention {OWN[0].digest[:6]}": 11.4}
    assert (tmp_path / "artifacts" / "0123" / "meta.json").is_file()
    loaded = tmp_path / "artifacts" / "0123" / "kernel.cu"
    loaded.write_text("loaded")
    anew = repeats.swept_anew(PROBLEM, 4, ["--device=0"])
    assert loaded.read_text() == "loaded", "a kernel that is kept stays as it is"
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == ["0123"]
    assert anew.facts["compiled"] == 1 and anew.facts["said"][-1].endswith("known:")
    kept = repeats.swept_anew(PROBLEM, 5, [], keeps_kernels=True)
    assert kept.facts["compiled"] == 1 and kept.facts["said"][-1].endswith("known: 0123")
    assert (tmp_path / "artifacts" / "4567" / "meta.json").is_file()
    with pytest.raises(BenchmarkError, match="no candidate passed"):
        repeats.swept_anew(PROBLEM, 9, [])


def test_kept_kernels_stay_as_they_are_and_units_share_a_file(tmp_path: Path) -> None:
    made, kept = tmp_path / "made", tmp_path / "kept"
    for name in ("known", "one", "two", "half", ".locks"):
        (made / name).mkdir(parents=True)
        (made / name / "kernel.so").write_text("new")
        if name != "half":
            (made / name / "meta.json").write_text("{}")
    (made / "two" / "kernel.so").unlink()
    (made / "two" / "kernel.so").hardlink_to(made / "one" / "kernel.so")
    (kept / "known").mkdir(parents=True)
    (kept / "known" / "kernel.so").write_text("loaded")
    (tmp_path / "other").hardlink_to(kept / "known" / "kernel.so")
    repeats.keep(made, kept)
    assert sorted(path.name for path in kept.iterdir()) == ["known", "one", "two"]
    assert (
        (kept / "known" / "kernel.so").read_text() == "loaded" == (tmp_path / "other").read_text()
    )
    one, two = (kept / name / "kernel.so" for name in ("one", "two"))
    assert one.read_text() == "new" and one.samefile(two)
    assert not one.samefile(made / "one" / "kernel.so")


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (JobResult(failed=[(PROBLEM, BenchmarkError("nothing passed"))]), "nothing passed"),
        (JobResult(outcomes=[outcome({CUDNN: 9.0})]), "no own kernel"),
    ],
)
def test_a_sweep_without_an_own_winner_ends_it(
    result: JobResult, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "Job", lambda *_: SimpleNamespace(run=lambda: result))
    runners: Any = None
    with pytest.raises(BenchmarkError, match=reason):
        repeats.swept(PROBLEM, runners, JobOptions())


def test_a_run_goes_on_with_its_file_and_a_failure_costs_one_sweep(tmp_path: Path) -> None:
    path, asked = tmp_path / "repeats.json", []

    def one(seed: int) -> repeats.Swept:
        asked.append(seed)
        if seed == 1:
            raise BenchmarkError("no candidate passed")
        return swept(OWN[seed % 2], 5.0, seed=seed, first_answer_s=20.0)

    head = {"format": repeats.FORMAT, "way": "empty cache"}
    found, failed = repeats._all(one, [0, 1, 2], path, head, None)
    assert asked == [0, 1, 2] and failed and [sweep.facts["seed"] for sweep in found] == [0, 2]
    again, failed = repeats._all(one, [0, 2, 3], path, head, None)
    assert asked == [0, 1, 2, 3] and not failed
    assert again == [*found, swept(OWN[1], 5.0, seed=3, first_answer_s=20.0)]
    runner: Any = Retiming({OWN[0]: 5.0, OWN[1]: 5.1})
    write_json(path, {"head": head, **repeats.compared(PROBLEM, runner, again)})
    assert repeats.kept(path, head) == again, "also after its pass"
    with pytest.raises(ConfigError, match="of other sweeps"):
        repeats.kept(path, head | {"way": "compiled"})
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no sweeps to go on with"):
        repeats.kept(path, head)


def test_no_sweep_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(repeats, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def one(seed: int) -> repeats.Swept:
        now[0] += 50.0
        return swept(OWN[0], 5.0, seed=seed)

    for seconds, count in ((149.0, 2), (150.0, 3), (1.0, 1)):
        now[0] = 0.0
        assert len(repeats._all(one, range(6), None, {}, seconds)[0]) == count


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "count", lambda: 0)
    with pytest.raises(BenchmarkError, match="no GPU"):
        repeats.main(["--shape", "S=512,D=64"])
