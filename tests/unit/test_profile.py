"""Profiles: reading Nsight Compute's table, running it, keeping what it counted."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tuner.cli import main
from tuner.cli.profile import profile_text
from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.measure import nsight, nsight_child, profile
from tuner.measure.profile import Profile
from tuner.measurement import Environment, Measurement, Regime, Status
from tuner.problem import AttentionProblem
from tuner.store import open_store

ASSET = Path(__file__).parents[1] / "assets" / "ncu_attention.csv"
PROBLEM = AttentionProblem.parse("S=1024,D=64")
CONFIG = Config("fused_attention", {"tile_n": 128})
REGIME = Regime.default("attention")
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"


def counted() -> Profile:
    kernels = profile.read_csv(ASSET.read_text())
    environment = Environment({"driver": "580", "ncu": "2025.3"})
    return Profile(PROBLEM, DEFAULT_GPU, REGIME, CONFIG, environment, kernels, "2026-11-21T12:00")


class TestTable:
    def test_the_recorded_one(self) -> None:
        """The values of the first counted kernel of fused attention, in base units."""
        (kernel,) = profile.read_csv(ASSET.read_text())
        assert kernel.kernel == "attention_kernel"
        assert kernel.get(TENSOR) == 36.65
        assert kernel.get(profile.DURATION) == 14560
        assert kernel.counters[profile.DURATION].unit == "ns"
        assert kernel.get(profile.CYCLES) == 25837
        assert kernel.get(profile.CLOCK) == 1.77e9

    def test_what_is_not_counted_is_absent(self) -> None:
        (kernel,) = profile.read_csv(ASSET.read_text())
        assert "lts__t_sector_hit_rate.pct" in ASSET.read_text()
        assert kernel.get("lts__t_sector_hit_rate.pct") is None
        assert [c.label for c, _ in kernel.shown(profile.SHARES)] == [
            "tensor cores",
            "special-function units",
            "FMA pipes",
            "ALU pipes",
            "issue slots",
        ]

    def test_each_launch_is_a_kernel(self) -> None:
        text = ASSET.read_text()
        row = text.splitlines()[-1].replace("14,560", "2,000").replace("attention_", "combine_")
        first, second = profile.read_csv(f"{text}{row}\n")
        assert (first.kernel, second.kernel) == ("attention_kernel", "combine_kernel")
        assert second.get(profile.DURATION) == 2000
        both = replace(counted(), kernels=(second, first))
        assert both.main.kernel == "attention_kernel"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "no table"),
            ("==PROF== nothing\n", "no table"),
            ("\n".join(ASSET.read_text().splitlines()[:-1]), "no launch"),
        ],
    )
    def test_a_table_that_is_none(self, text: str, message: str) -> None:
        with pytest.raises(BenchmarkError, match=message):
            profile.read_csv(text)

    def test_every_counter_has_a_name_and_says_something(self) -> None:
        metrics = [counter.metric for counter in profile.COUNTERS]
        assert len(set(metrics)) == len(metrics)
        assert all(counter.label and counter.says for counter in profile.COUNTERS)


class TestKeeping:
    def test_what_is_kept_is_found(self) -> None:
        path = profile.keep(counted())
        assert path.parent == profile.folder()
        assert profile.find(PROBLEM, DEFAULT_GPU, CONFIG) == counted()
        assert profile.find(PROBLEM, GPUS["H100"], CONFIG) is None
        assert profile.find(PROBLEM, DEFAULT_GPU, Config("fused_attention")) is None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format": "x"}, "not a profile"),
            ({"version": 9}, "version 9"),
            ({"kernels": []}, "no kernel"),
            ({"gpu": 3}, "damaged"),
        ],
    )
    def test_a_foreign_file_is_named(self, change: dict[str, object], message: str) -> None:
        path = profile.keep(counted())
        path.write_text(json.dumps({**counted().to_json(), **change}))
        with pytest.raises(ConfigError, match=message):
            profile.find(PROBLEM, DEFAULT_GPU, CONFIG)


def fake(folder: Path, body: str) -> Path:
    """An ncu that runs `body` with its table's path in $table and its arguments in "$@"."""
    path = folder / "ncu"
    find = 'for one in "$@"; do case $one in --log-file=*) table=${one#--log-file=};; esac; done'
    version = 'if [ "$1" = --version ]; then echo "Version 2025.3.1.0 (build 1)"; exit; fi'
    path.write_text(f"#!/bin/sh\n{version}\n{find}\n{body}\n")
    path.chmod(0o755)
    return path


def profiled_by(ncu: Path, regime: Regime = REGIME, timeout_s: float = 60.0) -> Profile:
    reference = Artifact("ref", Path("/ref.so"), "0", None, 0.0)
    kernels = {"attention": Artifact("key", Path("/key.so"), "1", None, 0.0)}
    environment = Environment({"driver": "580"})
    return nsight.profile(
        ncu,
        PROBLEM,
        CONFIG,
        DEFAULT_GPU,
        regime,
        reference,
        kernels,
        environment,
        timeout_s=timeout_s,
    )


class TestRunning:
    def test_the_table_becomes_a_profile(self, tmp_path: Path) -> None:
        seen = tmp_path / "arguments"
        ncu = fake(
            tmp_path,
            f'printf "%s\\n" "$@" > {seen}; for last; do :; done; cp "$last" {tmp_path}/request\n'
            f"cp {shlex.quote(str(ASSET))} $table",
        )
        found = profiled_by(ncu)
        assert found.kernels == counted().kernels
        assert found.environment.facts == {"driver": "580", "ncu": "2025.3.1.0"}
        arguments = seen.read_text().splitlines()
        assert "--clock-control=none" in arguments
        assert "--cache-control=none" in arguments
        assert "--profile-from-start=off" in arguments
        assert sys.executable in arguments
        asked = json.loads((tmp_path / "request").read_text())
        assert asked["config"] == CONFIG.to_json()
        assert asked["kernels"] == {"attention": ["key", "/key.so", "1"]}

    def test_a_cold_regime_flushes_the_caches(self) -> None:
        cold = nsight.command(Path("ncu"), Path("t"), "cold", ["a", "b"])
        assert "--cache-control=all" in cold
        assert "--metrics=a,b" in cold

    def test_a_counter_that_it_does_not_know_is_left_out(self, tmp_path: Path) -> None:
        ncu = fake(
            tmp_path,
            f'case "$*" in *{TENSOR}*) echo "==ERROR== Failed to find metric {TENSOR}"; exit 1;; '
            f"esac\ncp {shlex.quote(str(ASSET))} $table",
        )
        assert profiled_by(ncu).kernels == counted().kernels

    def test_a_call_that_fails_is_not_taken_for_an_unknown_counter(self, tmp_path: Path) -> None:
        """The table's heading names every counter; only the profiler's errors refuse one."""
        runs = tmp_path / "runs"
        body = f'echo run >> {runs}; cp {shlex.quote(str(ASSET))} $table; echo "boom"; exit 3'
        with pytest.raises(BenchmarkError, match="failed with code 3"):
            profiled_by(fake(tmp_path, body))
        assert runs.read_text() == "run\n"

    @pytest.mark.parametrize(
        ("body", "status", "message"),
        [
            (
                'echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission" > $table; '
                "exit 1",
                Status.UNAVAILABLE,
                r"only administrators read the GPU.s counters.*\(ERR_NVGPUCTRPERM\): run as root",
            ),
            (
                'echo "==ERROR== The application returned an error code (9)." > $table; exit 9',
                Status.LAUNCH_ERROR,
                "profiling failed with code 9: ==ERROR== The application returned",
            ),
            ("exit 0", Status.UNAVAILABLE, "no table"),
        ],
    )
    def test_what_went_wrong_is_one_line(
        self, tmp_path: Path, body: str, status: Status, message: str
    ) -> None:
        if body == "exit 0":
            body = "touch $table"
        with pytest.raises(BenchmarkError, match=message) as caught:
            profiled_by(fake(tmp_path, body))
        assert caught.value.status == status
        assert "\n" not in str(caught.value)

    def test_time_up_kills_what_it_started(self, tmp_path: Path) -> None:
        child = tmp_path / "child"
        ncu = fake(tmp_path, f"sleep 600 & echo $! > {child}; wait")
        started = time.monotonic()
        with pytest.raises(BenchmarkError, match="longer than 2 s") as caught:
            profiled_by(ncu, timeout_s=2.0)
        assert caught.value.status is Status.TIMEOUT
        assert time.monotonic() - started < 60
        state = Path(f"/proc/{child.read_text().strip()}/stat")
        deadline = time.monotonic() + 20
        while state.exists() and state.read_text().split()[2] != "Z":
            assert time.monotonic() < deadline, "its child lives"
            time.sleep(0.05)

    def test_where_there_is_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
        monkeypatch.setattr(nsight, "_PLACES", (str(tmp_path / "a"), str(tmp_path / "b")))
        with pytest.raises(BenchmarkError, match=r"Nsight Compute \(ncu\) is not in PATH"):
            nsight.find_ncu()
        with pytest.raises(BenchmarkError, match="is not in /nowhere/ncu"):
            nsight.find_ncu(Path("/nowhere/ncu"))
        (tmp_path / "cuda" / "bin").mkdir(parents=True)
        made = fake(tmp_path / "cuda" / "bin", "")
        assert nsight.find_ncu() == made

    def test_a_table_that_was_never_made(self, tmp_path: Path) -> None:
        with pytest.raises(BenchmarkError, match="no table"):
            profiled_by(fake(tmp_path, ":"))


class TestCommand:
    def test_without_ncu_it_says_so(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nsight, "_candidates", lambda: iter(()))
        assert main(["profile", "--shape", "S=1024,D=64"]) == 1
        error = capsys.readouterr().err
        assert "Nsight Compute (ncu) is not in" in error
        assert error.count("\n") == 1

    def test_which_kernel(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The best own one of the decision; or a vendor's by its name, the fastest of a list."""
        cli = importlib.import_module("tuner.cli.profile")
        cudnn = Config("vendor_sdpa", {"kernel": "cudnn"})
        plans = [
            Config(
                "vendor_cudnn_plans",
                {"kernel": "cudnn_plans", "engine": n, "is_unified": False, "version": 92000},
            )
            for n in (4, 8)
        ]
        ranking = [
            Measurement(PROBLEM, c, DEFAULT_GPU, REGIME, Status.OK, latency_us=us, is_final=True)
            for c, us in ((cudnn, 10.0), (CONFIG, 11.0), (plans[0], 12.0), (plans[1], 13.0))
        ]
        store = f"sqlite:///{tmp_path}/s.sqlite"
        with open_store(store) as opened:
            opened.decide(PROBLEM, DEFAULT_GPU, REGIME, ranking, "sweep")
        asked: list[Config] = []

        def profile_(ncu: Path, problem: object, config: Config, *rest: object) -> Profile:
            asked.append(config)
            return replace(counted(), config=config)

        monkeypatch.setattr(nsight, "find_ncu", lambda given: Path("ncu"))
        monkeypatch.setattr("tuner.measure.device.detect", lambda: DEFAULT_GPU)
        monkeypatch.setattr(cli, "_profile", profile_)
        arguments = ["profile", "--shape", "S=1024,D=64", "--store", store]
        assert main(arguments) == 0
        captured = capsys.readouterr()
        assert "tensor cores" in captured.out
        assert str(profile.folder()) in captured.err
        assert main([*arguments, "--kernel", "cudnn", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["config"] == cudnn.to_json()
        assert main([*arguments, "--kernel", "cudnn_plans"]) == 0
        assert asked == [CONFIG, cudnn, plans[0]]
        assert main([*arguments, "--kernel", "flash9"]) == 2
        assert "--kernel flash9 names 0 kernels" in capsys.readouterr().err
        assert main([*arguments[:2], "S=1031,D=64", *arguments[3:]]) == 1
        assert "`tuner sweep` comes first" in capsys.readouterr().err

    def test_what_is_not_legal_is_not_run(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """A store's decision may come from elsewhere: neither compiled nor launched."""
        illegal = Config("fused_attention", {"tile_n": 128, "early_exp": "0;"})
        measured = Measurement(
            PROBLEM, illegal, DEFAULT_GPU, REGIME, Status.OK, latency_us=9.0, is_final=True
        )
        store = f"sqlite:///{tmp_path}/s.sqlite"
        with open_store(store) as opened:
            opened.decide(PROBLEM, DEFAULT_GPU, REGIME, [measured], "sweep")
        monkeypatch.setattr(nsight, "find_ncu", lambda given: Path("ncu"))
        monkeypatch.setattr("tuner.measure.device.detect", lambda: DEFAULT_GPU)
        monkeypatch.setattr("tuner.compile.toolchain.find_toolchain", lambda: pytest.fail("used"))
        assert main(["profile", "--shape", "S=1024,D=64", "--store", store]) == 1
        error = capsys.readouterr().err
        assert f"fused_attention {illegal.digest} is not legal here" in error
        assert error.count("\n") == 1

    def test_the_text_names_values_and_units(self) -> None:
        lines = profile_text(counted()).splitlines()
        (tensor,) = (line for line in lines if line.startswith("tensor cores"))
        assert tensor.split()[2:4] == ["36.65", "%"]
        assert any(line.startswith("waits: arithmetic pipe busy") for line in lines)
        assert "ncu 2025.3" in lines[-1]


def test_the_request_says_all_that_the_profiled_process_needs() -> None:
    reference = Artifact("ref", Path("/ref.so"), "0", None, 0.0)
    asked = nsight_child.request(PROBLEM, CONFIG, reference, {"attention": reference})
    assert nsight_child._artifact(asked["reference"]) == reference
    assert asked["problem"] == PROBLEM.to_json()
    assert os.path.isabs(asked["kernels"]["attention"][1])  # noqa: PTH117  # text from JSON
