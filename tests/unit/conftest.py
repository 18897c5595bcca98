"""Stores whose tables are made once. And what tests of the runtime share: CPU tensors in a GPU's
place, and a process that forgets.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.hardware import DEFAULT_GPU
from tuner.store import Store, migrate, open_store

STREAM = 77

# Before torch is imported: its threads wait for one another by spinning. With two of them six
# modules here took 60 CPU-seconds instead of 20, on two cores busy with other work.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def migrated_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A new store takes over what the migrations made once: they take 20 ms with SQLite and 60
    with PostgreSQL, longer than most tests. Their own tests, and other processes, have them run.
    """
    path = tmp_path_factory.mktemp("schema") / "s.sqlite"
    open_store(str(path)).close()
    with contextlib.closing(sqlite3.connect(path)) as made:
        statements = {"sqlite": list(made.iterdump())[1:-1]}  # the transaction is the store's
    upgrade = migrate.upgrade

    def record(connection: sa.Connection, where: str) -> list[str]:
        """What the migrations say to a server, in one text: a round trip costs a millisecond."""
        seen: list[str] = []

        def note(_: object, __: object, statement: str, parameters: Any, *rest: object) -> None:
            if not statement.lstrip().startswith("SELECT"):
                assert not parameters, "a migration whose text is not all that it says"
                seen.append(statement)

        sa.event.listen(connection, "before_cursor_execute", note)
        upgrade(connection, where)
        sa.event.remove(connection, "before_cursor_execute", note)
        return [";".join(seen)]

    @functools.wraps(upgrade)
    def take_over(connection: sa.Connection, where: str) -> None:
        dialect = connection.dialect.name
        if dialect == "postgresql":
            connection.execute(sa.text(f"SELECT pg_advisory_xact_lock({migrate._LOCK})"))
        if migrate.revision(connection, where) is not None:
            upgrade(connection, where)
            return
        if dialect not in statements:
            statements[dialect] = record(connection, where)
            return
        for statement in statements[dialect]:
            connection.exec_driver_sql(statement)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "upgrade", take_over)
        yield


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store in a file."""
    with open_store(f"sqlite:///{tmp_path}/store.sqlite") as opened:
        yield opened


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def _stream(device: int, handle: Any) -> int:
    handle[0] = STREAM
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32)
def _bind(device: int) -> int:
    return 0


@pytest.fixture
def runtime() -> Iterator[SimpleNamespace]:
    """The runtime's modules, whose names the package gives to functions; all forget at the end."""
    if not importlib.util.find_spec("torch"):
        pytest.skip("torch is not installed")
    names = (
        "attention.attention_call call.answers call.counters call.devices call.dispatch call.plan "
        "call.proven_kernels call.refusal call.store_watch call.table products.gated "
        "products.quantiser products.scaled"
    ).split()
    paths = {name.partition(".")[2]: name for name in names}
    paths |= {"attention": "attention.dense", "products": "products.matmul"}
    modules = {
        name: importlib.import_module(f"tuner.runtime.{path}") for name, path in paths.items()
    }

    def forget() -> None:
        modules["table"].table.forget()
        modules["counters"].stats(reset=True)
        modules["dispatch"].use(None)
        modules["dispatch"]._thread = None
        modules["counters"]._counts.said.clear()
        modules["devices"]._gpus.clear()
        modules["quantiser"].kernels.forget()

    forget()
    yield SimpleNamespace(**modules, forget=forget)
    forget()


def _scaled_mm(torch: Any) -> Any:
    """PyTorch's product of e4m3; 2.11 takes factors of rows on GPUs only."""
    product = torch._scaled_mm

    def scaled(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, *others: Any) -> Any:
        if scale_a.numel() == scale_b.numel() == 1:
            return product(a, b, scale_a, scale_b, bias, *others)
        out = (a.float() * scale_a) @ (b.float() * scale_b)
        return (out if bias is None else out + bias).to(others[1])

    return scaled if torch.__version__ < "2.12" else product


@pytest.fixture
def on_cpu(runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The runtime, with CPU tensors served as an H200's and no portfolio; every call goes through
    Python.
    """
    import torch

    devices = runtime.devices
    monkeypatch.setattr(torch, "_scaled_mm", _scaled_mm(torch))
    monkeypatch.setattr(devices, "TYPE", "cpu")
    monkeypatch.setattr(devices, "is_autocast", lambda: torch.is_autocast_enabled("cpu"))
    monkeypatch.setattr(devices, "gpu_of", lambda index: DEFAULT_GPU)
    monkeypatch.setattr(devices, "stream_of", lambda index: STREAM)
    monkeypatch.setattr(devices, "stream_function", lambda: _stream)
    monkeypatch.setattr(devices, "bind_function", lambda: _bind)
    monkeypatch.setattr(devices, "current", lambda: -1)
    monkeypatch.setattr(devices, "use", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(devices, "is_capturing", lambda: False)
    ended = SimpleNamespace(join=lambda timeout=None: None)
    monkeypatch.setattr(runtime.dispatch, "prepare", lambda then: ended)
    monkeypatch.setattr(runtime.proven_kernels, "portfolios", lambda: ())
    monkeypatch.setattr(runtime.dispatch, "load_built", lambda then: False)
    return runtime


@pytest.fixture
def undecided(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The problems that the runtime looks up; none of them is decided."""
    asked: list[Any] = []
    monkeypatch.setattr(on_cpu.answers, "lookup", lambda problem, **_: asked.append(problem))
    return asked


@pytest.fixture
def zeros(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A kernel for every problem, whose outputs are zeros, or what `compute` gives; calls of the
    dispatcher, what was posed and the inputs are noted.
    """
    made = SimpleNamespace(dispatched=[], posed=[], inputs=[], compute=None)

    def find_out(kind: Any, dispatched: Any, pose: Any, device: int, _: Any = None) -> Any:
        posed = pose()
        made.dispatched.append(dispatched)

        def run(*tensors: Any) -> Any:
            made.posed.append(posed)
            made.inputs.append(tensors)
            return (made.compute or (lambda *_: tensors[0].new_zeros(posed.shape)))(*tensors)

        return on_cpu.plan.VendorPlan(posed.problem, Config("zeros", {}), -1, run)

    monkeypatch.setattr(on_cpu.table.table, "find_out", find_out)
    return made


@pytest.fixture
def noted(
    on_cpu: SimpleNamespace, undecided: list[Any], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Key and integers of each launch: every kernel that is asked for is in the cache."""
    launched: list[Any] = []

    def load(found: Any) -> Any:
        return SimpleNamespace(
            bind=lambda integers, scalars: lambda *_: launched.append((found.key, integers)),
            workspace_bytes=lambda integers: 0,
        )

    cache = SimpleNamespace(find=lambda key: SimpleNamespace(key=key))
    monkeypatch.setattr(on_cpu.plan, "ArtifactCache", lambda: cache)
    monkeypatch.setattr(on_cpu.plan, "load", load)
    monkeypatch.setattr(on_cpu.plan, "loaded", lambda key: None)
    return launched


@pytest.fixture
def tuned(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A tuned kernel for every attention problem: exact, and counted as a hit.

    `writes_lse` says whether it writes the log-sum-exp, `problems` which it was given. With
    `differentiates` there is one for gradients, too.
    """
    import torch

    @dataclasses.dataclass(frozen=True, eq=False)
    class Exact(on_cpu.plan.Plan):  # type: ignore[name-defined,misc]
        scale: float

        @property
        def has_lse(self) -> bool:
            return bool(made.writes_lse)

        def _enqueue(self, inputs: Any, lse: Any) -> Any:
            made.problems.append(self.problem)
            query, key, value = (t.detach().float() for t in inputs[:3])
            group = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(group, 1) for t in (key, value))
            scores = self.scale * query @ key.mT
            if cap := self.problem.softcap:
                scores = cap * (scores / cap).tanh()
            left, right = self.problem.window_left, self.problem.window_right
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
            if self.problem.is_causal or right >= 0:
                seen = seen.tril(0 if self.problem.is_causal else right)
            if left >= 0:
                seen = seen.triu(-left)
            for mask in inputs[3:]:
                is_boolean = mask.dtype == torch.bool
                scores = scores.masked_fill(~mask, -torch.inf) if is_boolean else scores + mask
            scores = scores.masked_fill(~seen, -torch.inf)
            if lse is not None:
                lse.copy_(scores.logsumexp(-1))
            operand = self.problem.output
            out = torch.empty_strided(operand.shape, operand.strides, dtype=inputs[0].dtype)
            # As kernels do: zeros where a query sees no key.
            return out.copy_(scores.softmax(-1).nan_to_num(0.0) @ value)

    @dataclasses.dataclass(frozen=True, eq=False)
    class ExactGradients(on_cpu.plan.Plan):  # type: ignore[name-defined,misc]
        scale: float

        def _enqueue(self, inputs: Any, lse: Any) -> Any:
            raise AssertionError("a call of gradients has three outputs")

        def _enqueue_all(self, inputs: Any) -> Any:
            made.problems.append(self.problem)
            query, key, value, out, lse, grad = (t.detach().float() for t in inputs)
            group = query.shape[1] // key.shape[1]
            keys, values = (t.repeat_interleave(group, 1) for t in (key, value))
            raw, slope = self.scale * query @ keys.mT, 1.0
            if cap := self.problem.softcap:
                ratio = (raw / cap).tanh()
                raw, slope = cap * ratio, 1 - ratio.square()
            left, right = self.problem.visible
            weights = (raw - lse[..., None]).exp().tril(right).triu(-left)
            inner = (grad * out).sum(-1, keepdim=True)
            scores = weights * (grad @ values.mT - inner) * self.scale * slope
            found = (
                scores @ keys,
                *(
                    t.unflatten(1, (key.shape[1], group)).sum(2)
                    for t in (scores.mT @ query, weights.mT @ grad)
                ),
            )
            return tuple(t.to(inputs[0].dtype) for t in found)

    def find_out(kind: Any, told: Any, pose: Any, device: int, pose_over: Any) -> Any:
        try:
            posed = pose()
        except ConfigError as exc:
            return on_cpu.refusal.Refusal(on_cpu.refusal.Kind.TENSORS, str(exc))
        is_backward = posed.problem.op == "attention_backward"
        if not made.serves or (is_backward and not made.differentiates):
            return on_cpu.refusal.Refusal(on_cpu.refusal.Kind.MISS, posed.problem.label())
        kind_of = ExactGradients if is_backward else Exact
        return kind_of(posed.problem, Config("exact", {}), device, posed.scale)

    made = SimpleNamespace(**vars(on_cpu), serves=True, writes_lse=True, differentiates=False)
    made.problems = []
    monkeypatch.setattr(on_cpu.table.table, "get", lambda kind: None)
    monkeypatch.setattr(on_cpu.table.table, "find_out", find_out)
    return made
