"""Ranks of a distributed program agree on their kernels: processes over gloo, CPU tensors in a
GPU's place. Each has a store and a cache of its own, as hosts have.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import tuner
from tuner.compile.artifacts import ArtifactCache
from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import AttentionProblem
from tuner.selection import invariant
from tuner.selection.kernel_list import Kernel, KernelList, Proof
from tuner.selection.portfolio import serving, shipped
from tuner.store import open_store

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.skipif(
    "not __import__('torch').distributed.is_available()", reason="this torch has no distributed"
)

PROBLEM = AttentionProblem.parse("S=64,D=64,H=2")
PATIENCE_S = 120
NVCC = "13.0.88"
LIST = f"{NVCC}-9.0.json"
#: Calls that nobody tuned; the portfolio has several own kernels for most.
BUCKETS = [
    f"S={length},D={width},H=8,causal=1"
    for width in (32, 64, 96, 128, 256)
    for length in (96, 224, 416, 576)
]
#: Ranks, forked from one process that has imported torch, which takes 2 CPU-seconds. The process
#: has one thread: a child of several can find a lock taken for ever. The ranks' store is a child as
#: well. A rank agrees, or not; then calls attention once, and says what was launched.
RANKS = """
import contextlib, json, os, pathlib, signal, socket, sys, traceback
from datetime import timedelta
import torch, torch.distributed as dist
import tuner
from tuner.errors import ConfigError, NotInvariantError
from tuner.hardware import GPUS
from tuner.measurement import Environment
from tuner.problem import AttentionProblem
from tuner.runtime.call import devices, dispatch, plan, proven_kernels
from tuner.runtime.parallel import distributed
from tuner.selection.kernel_list import KernelList

launched = []

def own(posed, member, measurement, device):
    def call(*tensors):
        launched.append(dict(measurement.config.params))
        return torch.nn.functional.scaled_dot_product_attention(*tensors, scale=posed.scale)
    if plan.ArtifactCache().find(measurement.artifacts["attention"]) is None:
        raise ConfigError("it is not in the cache")
    return plan.VendorPlan(posed.problem, measurement.config, device, call=call)

plan.own_plan = own
devices.TYPE, devices.current = "cpu", lambda: -1
devices.gpu_of = lambda index: GPUS[os.environ.get("RANKS_GPU", "H200")]
devices.is_capturing = lambda: False
devices.use = lambda index: contextlib.nullcontext()
dispatch.prepare = lambda then: None
proven_kernels.pytorchs = lambda problem, device: "cudnn"
asked = []
proven_kernels.background.request = lambda problem, gpu, is_wanted: asked.append(problem.label())
torch.set_num_threads(1)

def call(shape="S=64,D=64,H=2"):
    launched.clear()
    problem = AttentionProblem.parse(shape)
    tensors = [torch.randn(one.shape, dtype=torch.float16) for one in problem.operands[:3]]
    try:
        tuner.attention(*tensors, is_causal=problem.is_causal)
    except NotInvariantError:
        return "refused"
    return launched[-1] if launched else None

def proves(path, rows):
    "Adds the proven kernels of another host's list to this one's."
    path = pathlib.Path(path)
    known, more = KernelList.read(path), KernelList.from_json(json.loads(rows))
    known.with_kernels(more.kernels.values()).write(path)

def rank(how):
    devices.environment = lambda: Environment({"torch": how.get("torch", "2.11")})
    tuner.__version__ = how.get("version", tuner.__version__)
    meeting, has = distributed._Meeting, distributed._Meeting._has
    expired = how.get("expired", ())
    meeting._has = lambda self, key, share: key not in expired and has(self, key, share)
    members = {"rank": how["rank"], "world_size": how["world"]}
    shared = dist.TCPStore("127.0.0.1", how["port"], is_master=False)
    dist.init_process_group("gloo", store=shared, timeout=timedelta(seconds=100), **members)
    dist.barrier()  # they start together
    found = None
    if how.get("joins", True):
        found = distributed.agree(timeout_s=how["timeout_s"])
    first = call()
    buckets = [[call(one) for one in how.get("buckets", ())]]
    if "proves" in how:
        proves(*how["proves"])
        buckets.append([call(one) for one in how["buckets"]])
        dist.barrier()
        found = distributed.agree(timeout_s=how["timeout_s"], renew=True)
        buckets.append([call(one) for one in how["buckets"]])
    if "restarts" in how:  # as a new process
        distributed._agreed, distributed._round = None, 0
        dist.barrier()
        again = distributed.agree(timeout_s=how["timeout_s"])
        assert again == found and again is not found
        found = again
        buckets.append([call(one) for one in how["buckets"]])
    dist.barrier()
    if "late" in how:  # long after the others
        found = distributed.agree(timeout_s=how["timeout_s"])
        first = call()
    assert found is None or distributed.agree() is found
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({
        "refusal": found.refusal if found else None,
        "ranks": list(found.ranks) if found else None,
        "absent": sorted(found.absent) if found else None,
        "notes": list(found.notes) if found else None,
        "launched": first,
        "buckets": buckets,
        "asked": asked,
        "proven": len(found.proven) if found else 0,
        "fallbacks": list(tuner.stats().fallbacks),
    }), flush=True)

def fork(run, patience_s):
    assert len(os.listdir("/proc/self/task")) == 1, "a child of threads can hang"
    if child := os.fork():
        return child
    code = 1
    try:
        signal.alarm(patience_s)
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)

def serve(listener):
    store = dist.TCPStore("127.0.0.1", listener.getsockname()[1], is_master=True,
                          wait_for_workers=False, master_listen_fd=listener.detach())
    signal.pause()

def begin(order, port):
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(order["environment"])
    rank({**order["how"], "port": port})

for line in sys.stdin:  # the ranks of a run
    orders = json.loads(line)
    # Listens before they start: a port that is only looked for may be another program's by then.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, patience_s = listener.getsockname()[1], orders[0]["patience_s"]
        store = fork(lambda: serve(listener), 2 * patience_s)
    children = [fork(lambda: begin(order, port), patience_s) for order in orders]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    print(json.dumps(codes), flush=True)
"""


def config(tile: int) -> Config:
    return Config("fused_attention", {"tile_n": tile})


def artifact(tile: int) -> str:
    return f"{tile:032x}"


def proven(spec: KernelSpec, cache: ArtifactCache, library: Path) -> Kernel:
    """A proven kernel whose artifact is in a cache."""
    key = hashlib.sha256(spec.key.encode()).hexdigest()[:32]
    facts: dict[str, Any] = {"resources": None, "compile_cpu_s": 1.0, "source": ""}
    built = cache.put(key, library, **facts, facts={"nvcc": NVCC})
    return replace(Kernel.of(spec, built), proof=Proof(64, 0, "NVIDIA H200", "580", "2026-11-29"))


def listed(rows: Iterable[Kernel]) -> KernelList:
    return KernelList(NVCC, "4.2.0", "9.0", {row.spec: row for row in rows})


@dataclass
class Host:
    """What a rank finds where it runs: its store's ranking, best first, and compiled kernels."""

    ranking: tuple[int, ...] = (128, 64)
    compiled: tuple[int, ...] = (128, 64, 32)
    proven: tuple[KernelSpec, ...] = ()
    built: tuple[KernelSpec, ...] = ()
    """Kernels in the cache that no list names."""
    gpu: str = "H200"
    is_invariant: bool = False
    how: Mapping[str, Any] = field(default_factory=dict)

    def furnish(self, folder: Path) -> dict[str, str]:
        folder.mkdir()
        library = folder / "kernel.so"
        library.write_bytes(b"kernel")
        cache = ArtifactCache(folder / "artifacts")
        for tile in self.compiled:
            cache.put(
                artifact(tile), library, resources=None, compile_cpu_s=1.0, source="", facts={}
            )
        if self.proven:
            rows = [proven(spec, cache, library) for spec in (*self.built, *self.proven)]
            listed(rows[len(self.built) :]).write(folder / "kernels" / LIST)
        url = f"sqlite:///{folder}/store.sqlite"
        if self.ranking:
            ranked = [
                Measurement(
                    PROBLEM,
                    config(tile),
                    DEFAULT_GPU,
                    Regime.default("attention"),
                    Status.OK,
                    latency_us=10.0 + place,
                    is_final=True,
                    artifacts={"attention": artifact(tile)},
                )
                for place, tile in enumerate(self.ranking)
            ]
            with open_store(url) as store:
                store.decide(PROBLEM, DEFAULT_GPU, ranked[0].regime, ranked, "sweep")
        names = {"TUNER_CACHE_DIR": str(folder), "TUNER_STORE": url, "RANKS_GPU": self.gpu}
        mode = {"TUNER_BATCH_INVARIANT": "1"} if self.is_invariant else {}
        return {**names, **mode, "TUNER_BUILD_ON_MISS": "1"}


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """The process that the ranks are forked from."""
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "ranks.py"
    script.write_text(RANKS)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(tuner.__file__).parent.parent),
            "TMPDIR": str(folder),  # ranks leave theirs: they end by os._exit
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture
def run(tmp_path: Path, forks: subprocess.Popen[str]) -> Run:
    """Runs a rank on each host; what each says."""

    def ranks(*hosts: Host, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        said = [(tmp_path / f"{rank}.out", tmp_path / f"{rank}.err") for rank in range(len(hosts))]
        orders = [
            {
                "environment": {"GLOO_SOCKET_IFNAME": "lo", **host.furnish(tmp_path / f"{rank}")},
                "how": {"rank": rank, "world": len(hosts), "timeout_s": timeout_s, **host.how},
                "patience_s": PATIENCE_S,
                "out": str(said[rank][0]),
                "err": str(said[rank][1]),
            }
            for rank, host in enumerate(hosts)
        ]
        assert forks.stdin is not None and forks.stdout is not None
        print(json.dumps(orders), file=forks.stdin, flush=True)
        codes = json.loads(forks.stdout.readline())
        texts = [(out.read_text(), err.read_text()) for out, err in said]
        for code, (out, err) in zip(codes, texts, strict=True):
            assert code == 0, out + err
        return [{**json.loads(out.splitlines()[-1]), "stderr": err} for out, err in texts]

    return ranks


def launched(seen: list[dict[str, Any]]) -> list[int | None]:
    return [rank["launched"] and rank["launched"]["tile_n"] for rank in seen]


def test_every_rank_launches_what_rank_0_decides(run: Run) -> None:
    world, others = 4, [Host((64, 128)), Host((32,)), Host(())]
    seen = run(Host((128, 64)), *others)
    assert launched(seen) == [128] * world
    assert all(rank["ranks"] == list(range(world)) and not rank["refusal"] for rank in seen)


def test_without_an_agreement_they_would_not(run: Run) -> None:
    apart = {"joins": False}
    assert launched(run(Host((128,), how=apart), Host((64,), how=apart))) == [128, 64]


def test_a_kernel_that_one_rank_lacks_is_launched_by_none(run: Run) -> None:
    lacks = Host((64, 128), compiled=(64, 32), how={"torch": "2.12"})
    seen = run(Host((128, 64)), lacks)
    assert launched(seen) == [64, 64]
    assert artifact(128) in seen[0]["absent"] and artifact(64) not in seen[0]["absent"]
    note = "rank 1 has torch 2.12, rank 0 2.11"
    assert all(rank["notes"] == [note] and note in rank["stderr"] for rank in seen)


def test_a_rank_that_misses_holds_nobody_up_and_finds_what_they_agreed_on(run: Run) -> None:
    """For the first rank the time of the last one's answer is over at once. Who waited for it
    all the same would be killed after `PATIENCE_S`.
    """
    late = Host((32,), compiled=(64,), how={"joins": False, "late": True})
    first = Host((128, 64), how={"expired": ["answer/3"]})
    seen = run(first, *[Host((128, 64))] * 2, late, timeout_s=10 * PATIENCE_S)
    assert launched(seen) == [128, 128, 128, 64], "it came too late to say that it lacks one"
    assert "lacks 1 of their kernels" in seen[3]["stderr"]
    assert {tuple(rank["ranks"]) for rank in seen} == {(0, 1, 2)}
    assert seen[0]["notes"] == ["rank 3 did not come in time"]


def test_where_rank_0_misses_all_call_pytorch_and_it_too(run: Run) -> None:
    missing = Host((128,), how={"joins": False, "late": True})
    seen = run(missing, Host((64,)), Host((64,)), timeout_s=1.0)
    assert launched(seen) == [None] * 3
    assert {rank["refusal"] for rank in seen} == {"rank 0 did not come in time"}
    assert all("the ranks did not agree" in rank["fallbacks"][-1] for rank in seen)


def test_ranks_of_two_versions_serve_nothing(run: Run) -> None:
    seen = run(Host(), Host(how={"version": "0.0.9"}))
    assert launched(seen) == [None, None]
    assert {rank["refusal"] for rank in seen} == {
        f"rank 1 runs tuner 0.0.9, rank 0 {tuner.__version__}"
    }


def own_configs(shape: str, *, in_mode: bool = False) -> list[tuple[dict[str, Any], KernelSpec]]:
    """The portfolio's own kernels of a call, best first: their parameters, and the kernel. In the
    batch-invariant mode those of the layer's class.
    """
    problem = AttentionProblem.parse(shape)
    mine = next(one for one in serving(shipped(), DEFAULT_GPU) if one.op == problem.op)
    of_class = invariant.select(problem, DEFAULT_GPU, mine) if in_mode else None
    selection = of_class or mine.select(problem)
    chosen = [config for _, config in selection.own()]
    kernels = [family(config.family).kernels(problem, config) for config in chosen]
    return [
        (dict(config.params), next(iter(specs.values())))
        for config, specs in zip(chosen, kernels, strict=True)
    ]


def expected(*hosts: Host) -> list[dict[str, Any] | None]:
    """Parameters of the best kernel of each bucket that is proven on all hosts."""
    everywhere = set.intersection(*({spec.key for spec in host.proven} for host in hosts))
    return [
        next((params for params, spec in own_configs(one) if spec.key in everywhere), None)
        for one in BUCKETS
    ]


EVERY = tuple({spec.key: spec for one in BUCKETS for _, spec in own_configs(one)}.values())


def test_the_portfolio_serves_all_ranks_alike_by_what_all_have_proven(run: Run) -> None:
    how = {"buckets": BUCKETS, "restarts": True}
    hosts = [Host(how=how), Host(how=how)]
    hosts[0].proven = tuple(spec for place, spec in enumerate(EVERY) if place % 3)
    hosts[1].proven = tuple(spec for place, spec in enumerate(EVERY) if place % 4 != 1)
    first, second = run(*hosts)
    wanted = expected(*hosts)
    assert first["buckets"] == second["buckets"] == [wanted, wanted], "before and after a restart"
    assert len(wanted) == 20 and 10 < sum(one is not None for one in wanted)
    assert wanted != expected(hosts[0]) and wanted != expected(hosts[1])


def test_in_the_batch_invariant_mode_ranks_choose_or_refuse_alike(run: Run) -> None:
    """A class's next kernel serves where a rank lacks the first; without one, none answers."""
    classes = [own_configs(one, in_mode=True) for one in BUCKETS]
    several = next(of for of in classes if len({spec.key for _, spec in of}) > 1)
    only = next(of for of in classes if len({spec.key for _, spec in of}) == 1)
    every = {spec.key: spec for of in classes for _, spec in of}
    lacking = several[0][1].key, only[0][1].key
    hosts = [
        Host(
            proven=tuple(spec for key, spec in every.items() if key != lacks),
            is_invariant=True,
            how={"buckets": BUCKETS},
        )
        for lacks in lacking
    ]
    wanted = [
        next((params for params, spec in of if spec.key not in lacking), "refused")
        for of in classes
    ]
    assert [rank["buckets"] for rank in run(*hosts)] == [[wanted], [wanted]]
    assert several[0][0] not in wanted and "refused" in wanted and len(wanted) == 20


def test_kernels_that_are_built_later_serve_from_the_next_agreement_on(
    run: Run, tmp_path: Path
) -> None:
    few, all_of_them = Host(proven=EVERY[1::2], built=EVERY[::2]), Host(proven=EVERY)
    cache, library = ArtifactCache(tmp_path / "more"), tmp_path / "more.so"
    library.write_bytes(b"kernel")
    rows = json.dumps(listed(proven(spec, cache, library) for spec in EVERY).to_json())
    for rank, host in enumerate((few, all_of_them)):
        path = str(tmp_path / f"{rank}" / "kernels" / LIST)
        host.how = {"buckets": BUCKETS, "proves": [path, rows]}
    seen = run(few, all_of_them)
    before, after = expected(few, all_of_them), expected(all_of_them)
    assert before != after
    for rank in seen:
        assert rank["buckets"] == [before, before, after]
        assert rank["asked"], "agreed ranks have missing kernels built"


def test_ranks_with_unlike_gpus_have_no_portfolio(run: Run) -> None:
    how = {"buckets": BUCKETS}
    hosts = [Host(proven=EVERY, how=how), Host(proven=EVERY, how=how, gpu="H100")]
    seen = run(*hosts)
    assert launched(seen) == [128, 128] and [rank["proven"] for rank in seen] == [0, 0]
    assert all(rank["buckets"] == [[None] * 20] for rank in seen)
    assert "the ranks' GPUs are not alike: no portfolio serves" in seen[1]["notes"]


def test_an_engine_s_rank_agrees_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.runtime.call import devices
    from tuner.runtime.call.table import table
    from tuner.runtime.parallel import distributed

    calls: list[str] = []

    def fail() -> None:
        calls.append("agree")
        raise StoreError("no temporary folder")

    monkeypatch.setattr(distributed, "agree", fail)
    monkeypatch.setattr(table, "pin", lambda *_, refusal: calls.append(refusal.detail))
    distributed.agree_in_engine()
    assert calls == []
    monkeypatch.setattr(devices, "ranks", lambda: 2)
    distributed.agree_in_engine()
    assert calls == ["agree", "no temporary folder"]


def test_what_agree_needs() -> None:
    from tuner.runtime.parallel.distributed import agree

    with pytest.raises(ConfigError, match="init_process_group first"):
        agree()
    with pytest.raises(ConfigError, match="timeout_s=0 is out of range"):
        agree(timeout_s=0)


def test_a_large_snapshot_travels_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone in its group, over a store whose messages are limited as TCPStore's are."""
    import torch.distributed as dist

    from tuner.runtime.parallel import distributed

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    data = os.urandom(distributed._CHUNK_BYTES * 2 + 5)
    monkeypatch.setattr(distributed, "take", lambda: data)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    meeting = distributed._Meeting(store, tmp_path, 5.0)
    meeting._propose()
    assert json.loads(meeting._store.get("proposal"))["chunks"] == 3
    assert meeting._fetch(3) == data


def test_an_answer_is_waited_for_until_its_share_of_the_time_is_over() -> None:
    import torch.distributed as dist

    from tuner.runtime.parallel import distributed

    waited: list[float] = []

    class Store(dist.Store):
        """Nothing comes while somebody waits; one key is there."""

        def wait(self, keys: list[str], timeout: Any) -> None:
            waited.append(timeout.total_seconds())
            if keys != ["there"]:
                raise dist.DistStoreError("timed out")

        def check(self, keys: list[str]) -> bool:
            return keys == ["there"]

    meeting = object.__new__(distributed._Meeting)
    meeting._store, meeting._timeout_s = Store(), 600.0
    meeting._began = time.monotonic()
    assert meeting._has("there", 0.5) and not meeting._has("missing", 0.5)
    assert len(waited) == 2 and all(0 < left <= 300 for left in waited)
    meeting._began -= 300
    assert meeting._has("there", 0.5) and not meeting._has("missing", 0.5)
    assert len(waited) == 2, "it waits no longer"
    assert not meeting._has("missing", 1.0) and len(waited) == 3
