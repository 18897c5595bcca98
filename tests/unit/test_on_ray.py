"""Sweeps on a real Ray cluster of this machine. Its compile tasks and actors are those of
`ray_fakes`: libraries are made up, times come from a recording, GPUs are numbers.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray_fakes as fakes

from tuner.cli import main
from tuner.compile import toolchain
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import families_of
from tuner.families.base import Family
from tuner.measurement import Measurement, Provenance, Status
from tuner.runners import on_ray
from tuner.runners.choose import ClusterPlace, Machine
from tuner.runners.on_ray import Cluster, ClusterRunners
from tuner.runners.ray_workers import Parcels
from tuner.runners.replay import ReplayRunner
from tuner.store import Store, open_store
from tuner.tuning import competition
from tuner.tuning.controller import Controller
from tuner.tuning.job import Job, JobOptions
from tuner.tuning.sweep import Sweep, SweepOptions

ray: Any = pytest.importorskip("ray", reason="Ray is not installed (the extra 'ray')")

OPTIONS = SweepOptions((fakes.FAMILY,), "full", trials=100, sampler="random")
TOOLS = toolchain.Toolchain(
    Path("/cuda/nvcc"), "13.0.88", Path("/g++"), "g++ 12", Path("/c"), "4.2.0"
)
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head that compiles, and two nodes with a GPU each; what the nodes read is set before."""
    from ray.cluster_utils import Cluster as RayCluster

    here = Path(fakes.__file__)
    roots = (str(here.parents[2]), str(here.parent), os.environ.get("PYTHONPATH", ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_FAKES", str(tmp_path_factory.mktemp("fakes")))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, roots)))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_worker_niceness", "0")  # of 15 beside the other tests they would starve
        memory = 100 << 20
        made = RayCluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 2,
                "num_gpus": 0,
                "include_dashboard": False,
                "object_store_memory": memory,
            },
        )
        try:
            for gpu in ("H200", "H100"):
                made.add_node(
                    num_cpus=1, num_gpus=1, labels={"gpu": gpu}, object_store_memory=memory
                )
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


class Connected:
    """Ray as the tests share it, connected once: whoever closes it leaves the connection."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def shutdown(self) -> None:
        pass


@pytest.fixture(scope="module")
def connected(nodes: Any) -> Connected:
    """Processes of tasks that ended take the next test's."""
    ray.init(nodes.address, log_to_driver=False, logging_level=logging.ERROR)
    return Connected()


class Setting:
    def __init__(self, nodes: Any, store: Store) -> None:
        self.nodes, self.store = nodes, store
        self.notes: list[str] = []

    @contextmanager
    def cluster(self, **labels: str) -> Iterator[Cluster]:
        place = ClusterPlace(self.nodes.address, labels)
        # An earlier cluster's actors end in their own time.
        wait_for(lambda: ray.available_resources().get("GPU") == ray.cluster_resources()["GPU"])
        with Cluster(
            place, self.notes.append, gauge=fakes.RecordedGauge, build_unit=fakes.build
        ) as cluster:
            yield cluster

    @contextmanager
    def runners(self, **labels: str) -> Iterator[ClusterRunners]:
        with self.cluster(**labels) as cluster, cluster.only(Machine(), self.notes.append) as only:
            yield only

    def sweep(self, runners: ClusterRunners) -> Any:
        runner = runners.of(fakes.PROBLEM, fakes.REGIME)
        return Sweep(
            fakes.PROBLEM, fakes.REGIME, runner, self.store, OPTIONS, catalogue=catalogue
        ).run()

    def quick(self) -> list[Measurement]:
        found = self.store.measurements(provenance=Provenance.MEASURED, final=False)
        repeated = [c for c, n in Counter((m.gpu.name, m.config) for m in found).items() if n > 1]
        assert not repeated
        return list(found)

    def check(self, outcome: Any, slower: float = 1.0) -> None:
        """It decided as a replay does, and every trial is there once, with its recorded time.

        Another GPU's finalists are others: they are chosen by its expected times, too.
        """
        expected = replayed()
        assert outcome.provenance is Provenance.MEASURED and not outcome.failures
        own, other = outcome.ranking[0], expected[0]
        assert own.config == other.config and own.is_final
        if slower == 1.0:
            assert [m.config for m in outcome.ranking] == [m.config for m in expected]
        assert own.latency_us == pytest.approx(slower * other.latency_us)
        times = {m.config: m.latency_us for m in fakes.recorded().measurements if not m.is_final}
        seen = {m.config: m for m in self.quick() if m.gpu == outcome.gpu}
        assert seen.keys() == times.keys()
        assert all(
            m.status is Status.OK and m.latency_us == pytest.approx(slower * times[config])
            for config, m in seen.items()
        )


def catalogue(op: str) -> Mapping[str, Family]:
    """The families of the recording, whose space is what was recorded."""
    found: dict[str, Family] = {}
    measured = fakes.recorded().measurements
    for name, family in families_of(op).items():
        configs = list(dict.fromkeys(m.config for m in measured if m.config.family == name))
        if configs:
            found[name] = copy.copy(family)
            found[name].space = lambda *_, configs=configs: configs  # type: ignore[method-assign]
    return found


def replayed() -> list[Measurement]:
    """The ranking of a sweep of the replay runner."""
    with open_store("sqlite://") as store:
        runner = ReplayRunner(fakes.recorded())
        sweep = Sweep(fakes.PROBLEM, fakes.REGIME, runner, store, OPTIONS, catalogue=catalogue)
        return list(sweep.run().ranking)


@pytest.fixture
def setting(
    nodes: Any, connected: Connected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Setting]:
    monkeypatch.setattr(on_ray, "_connect", lambda address: connected)
    for path in fakes.folder().iterdir():
        if path.is_file():
            path.unlink()
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(toolchain, "find_toolchain", lambda: TOOLS)
    # Only what was recorded has a time.
    monkeypatch.setattr(competition.Competition, "_beyond", lambda *_: ())
    with open_store(f"sqlite:///{tmp_path}/s.sqlite") as store:
        yield Setting(nodes, store)


def tell(name: str, text: str = "1") -> None:
    (fakes.folder() / name).write_text(text)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_connects_and_leaves(nodes: Any) -> None:
    with Cluster(
        ClusterPlace(nodes.address, {"gpu": "H200"}), print, gauge=fakes.RecordedGauge
    ) as cluster:
        assert ray.is_initialized() and len(cluster.kinds) == 1
    assert not ray.is_initialized()


class TestSweep:
    """Whole sweeps, one GPU model."""

    def test_decides_as_the_replay_runner(self, setting: Setting) -> None:
        tell("overlap")
        with setting.runners(gpu="H200") as runners:
            setting.check(setting.sweep(runners))
            kept = runners.compiler().artifacts
            keys = {key for m in setting.quick() for key in m.artifacts.values()}
            assert keys and all(kept.find(key) is not None for key in keys)
        assert max(event["kernels"] for event in fakes.events("built")) > 1, "kernels share units"
        assert len(fakes.events("actor")) == 1
        assert setting.notes == ["measuring on a Ray cluster: 1 NVIDIA H200"]

    def test_compiles_on_nodes_without_gpus(self, setting: Setting) -> None:
        with setting.runners(gpu="H200") as runners:
            with_gpus = {n["NodeID"] for n in ray.nodes() if n["Resources"].get("GPU")}
            setting.sweep(runners)
        assert not with_gpus & {event["node"] for event in fakes.events("built")}

    def test_what_was_compiled_is_not_compiled_again(self, setting: Setting) -> None:
        with setting.runners(gpu="H200") as runners:
            setting.sweep(runners)
        built = len(fakes.events("built"))
        with setting.runners(gpu="H200") as runners, open_store("sqlite://") as other:
            setting.store = other
            setting.check(setting.sweep(runners))
        assert len(fakes.events("built")) == built

    def test_survives_an_actor_that_dies(self, setting: Setting) -> None:
        tell("actor_dies")
        with setting.runners(gpu="H200") as runners:
            setting.check(setting.sweep(runners))
        assert len(fakes.events("actor")) == 2

    def test_replaces_an_actor_after_a_sticky_error(self, setting: Setting) -> None:
        tell("sticky_error")
        with setting.runners(gpu="H200") as runners:
            setting.check(setting.sweep(runners))
        assert len({event["pid"] for event in fakes.events("actor")}) == 2

    def test_survives_a_task_that_dies(self, setting: Setting) -> None:
        tell("task_dies")
        with setting.runners(gpu="H200") as runners:
            setting.check(setting.sweep(runners))

    def test_survives_a_node_that_is_lost(self, setting: Setting) -> None:
        spare = setting.nodes.add_node(
            num_cpus=1, num_gpus=1, labels={"gpu": "H200"}, object_store_memory=100 << 20
        )
        lost = threading.Event()

        def lose() -> None:
            wait_for(lambda: len({event["pid"] for event in fakes.events("measured")}) == 2)
            setting.nodes.remove_node(spare, allow_graceful=False)
            lost.set()

        thread = threading.Thread(target=lose)
        thread.start()
        try:
            with setting.runners(gpu="H200") as runners:
                assert runners.devices == (0, 1)
                setting.check(setting.sweep(runners))
                thread.join(PATIENCE_S)
                # The next test is not to count on its GPU.
                wait_for(lambda: sum(node["Alive"] for node in ray.nodes()) == 3)
        finally:
            thread.join(PATIENCE_S)
        assert lost.is_set()

    def test_ends_where_every_actor_dies(self, setting: Setting) -> None:
        tell("all_actors_die")
        with (
            setting.runners(gpu="H200") as runners,
            pytest.raises(BenchmarkError, match="3 workers went away at one request"),
        ):
            setting.sweep(runners)
        assert not setting.quick(), "nothing is said of the candidates"

    def test_cancelling_frees_the_gpu(self, setting: Setting) -> None:
        tell("slow")
        with setting.runners(gpu="H200") as runners:
            runner = runners.of(fakes.PROBLEM, fakes.REGIME)
            config = fakes.recorded().measurements[0].config
            runner.submit(fakes.PROBLEM, [config])
            wait_for(lambda: fakes.events("measured"))
            (fakes.folder() / "slow").unlink()
            timer = threading.Timer(0.1, runner.cancel)
            timer.start()
            assert runner.collect() == []
            timer.join()
            runner.submit(fakes.PROBLEM, [config])
            (measured,) = runner.collect()
        assert measured.ok and len(fakes.events("actor")) == 2


class TestHashes:
    """Libraries whose bytes are not what their hash says."""

    def test_a_damaged_library_is_built_again(self, setting: Setting) -> None:
        tell("task_damages")
        with setting.runners(gpu="H200") as runners:
            setting.check(setting.sweep(runners))

    def test_a_library_that_is_always_damaged_ends_the_sweep(self, setting: Setting) -> None:
        tell("all_tasks_damage")
        with (
            setting.runners(gpu="H200") as runners,
            pytest.raises(BenchmarkError, match="failed 3 times: a library was damaged"),
        ):
            setting.sweep(runners)
        assert not [event for event in fakes.events("measured") if event["candidates"] > 6]

    def test_an_actor_refuses_a_damaged_library(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        of, damaged = Parcels.of, []

        def damage(self: Parcels, artifact: Any) -> Any:
            if damaged:
                return of(self, artifact)
            damaged.append(artifact)
            return ray.put({artifact.sha256: b"of somebody else"})

        monkeypatch.setattr(Parcels, "of", damage)
        with setting.runners(gpu="H200") as runners:
            setting.check(setting.sweep(runners))
        (refused,) = fakes.events("refused")
        assert "bytes have the hash" in refused["reasons"][0]

    def test_a_library_that_never_arrives_ends_the_sweep(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Parcels, "of", lambda self, artifact: ray.put({"0": b""}))
        with (
            setting.runners(gpu="H200") as runners,
            pytest.raises(BenchmarkError, match=r"did not arrive at here in 3 attempts.*not hold"),
        ):
            setting.sweep(runners)
        assert not fakes.events("measured")


class TestPlacing:
    """Which nodes are taken."""

    def test_two_models_keep_separate_results(self, setting: Setting) -> None:
        with setting.cluster() as cluster:
            first, second = cluster.runners(Machine(), setting.notes.append)
            with first, second:
                result = Job(
                    [fakes.PROBLEM],
                    first,
                    setting.store,
                    JobOptions(OPTIONS),
                    catalogue=catalogue,
                    further=[second],
                ).run()
            with pytest.raises(ConfigError, match=r"several GPU models \(.*choose with"):
                cluster.only(Machine(), setting.notes.append)
        assert not result.failed
        by_gpu = {outcome.gpu.name: outcome for outcome in result.outcomes}
        assert by_gpu.keys() == {fakes.H200.name, fakes.H100.name}
        setting.check(by_gpu[fakes.H200.name])
        setting.check(by_gpu[fakes.H100.name], fakes.SLOWER)
        entries = setting.store.entries(problem=fakes.PROBLEM, provenance=Provenance.MEASURED)
        assert {entry.gpu.name for entry in entries} == by_gpu.keys()

    def test_a_label_that_no_node_has(
        self, setting: Setting, capsys: pytest.CaptureFixture[str]
    ) -> None:
        where = ["--runner", "ray", "--ray-address", setting.nodes.address]
        for label, kind in (("--gpu-label", "GPU"), ("--compile-label", "CPU")):
            words = ["sweep", "--shape", "S=512,D=64", *where, label, "zone=moon"]
            assert main(words) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(
                f"tuner: no node of the Ray cluster has a {kind} and label zone=moon (it has: "
            )
            assert "1 node with 2 CPU, 0 GPU" in line
            assert "1 node with 1 CPU, 1 GPU, gpu=H200" in line
        assert not fakes.events("actor") and not fakes.events("built")

    def test_no_cluster(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["worker", "--runner", "ray", "--ray-address", "127.0.0.1:1"]
        assert main(words) == 2
        assert "no Ray cluster answers at 127.0.0.1:1" in capsys.readouterr().err

    def test_a_gpu_that_cannot_be_used(self, setting: Setting) -> None:
        tell("broken", "H100")
        with setting.cluster() as cluster:
            assert [kind.card.gpu for kind in cluster.kinds] == [fakes.H200]
        assert "1 of 2 GPUs cannot be used: CUDA device 0 was not found" in setting.notes
        with (
            pytest.raises(BenchmarkError, match="no GPU of the cluster can be used: CUDA device"),
            setting.cluster(gpu="H100"),
        ):
            pass

    def test_gpus_that_others_took(self, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        taken = {"CPU": 4.0}
        monkeypatch.setattr(Connected, "available_resources", lambda self: taken, raising=False)
        with (
            pytest.raises(BenchmarkError, match="all 1 GPUs of the chosen nodes are taken"),
            setting.cluster(gpu="H200"),
        ):
            pass
        assert not fakes.events("actor")

    def test_a_controller_works_off_a_job(self, setting: Setting) -> None:
        options = JobOptions(OPTIONS)
        job = setting.store.jobs.submit([fakes.PROBLEM], options.to_json())
        with setting.cluster(gpu="H200") as cluster:
            worker = Controller(
                setting.store, Machine(), catalogue=catalogue, create_runners=cluster.only
            )
            with worker as controller:
                assert controller.run(drain=True) == 1
        assert [task.state for task in setting.store.jobs.tasks(job)] == ["done"]
        assert len(setting.quick()) == sum(not m.is_final for m in fakes.recorded().measurements)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu-label", "gpu=H200"], "--gpu-label belongs to --runner ray"),
        (["--gpus", "2"], "--gpus belongs to --runner ray"),
        (["--runner", "ray", "--gpu-label", "H200"], "--gpu-label H200: wanted is NAME=VALUE"),
        (["--runner", "ray", "--replay"], "--replay needs no cluster"),
    ],
)
def test_wrong_arguments(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--shape", "S=512,D=64", *words]) == 2
    assert said in capsys.readouterr().err
