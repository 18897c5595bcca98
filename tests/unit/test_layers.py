"""The direction of the imports, read from the source: a room imports from rooms below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tuner

PACKAGE = Path(tuner.__file__).parent

#: Rooms by layer. A room is a module of `tuner` or a folder.
LAYERS: tuple[set[str], ...] = (
    {
        "document",
        "errors",
        "problem",
        "config",
        "measurement",
        "hardware",
        "output",
        "settings",
        "resources",
    },
    {"families", "store"},
    {
        "answer",
        "artifacts",
        "build_on_miss",
        "compiler",
        "device",
        "dispatcher",
        "lookup",
        "mirror",
        "nearest",
        "processes",
        "profile",
        "ptxas",
        "ranges",
        "recording",
        "render",
        "rule",
        "shipped",
        "snapshot",
        "toolchain",
        "triton_kernels",
    },
    {
        "rota",
        "verdict",
        "gate",
        "benchmark",
        "stages",
        "worker",
        "worker_client",
        "profiled",
        "profiler",
    },
    {"evaluate"},
    {"runners"},
    {"surrogate", "optuna_sampler", "transfer", "search", "fit", "plan", "shapes"},
    {
        "ranking",
        "outcome",
        "watch",
        "sweep",
        "ahead",
        "survey",
        "job",
        "controller",
        "revalidate",
        "bundle",
    },
    {"bench", "cli", "report", "service", "__main__"},
)
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
#: Beside the layers: what a model calls reads these and nothing else of the project.
RUNTIME_ALLOWED = {
    "runtime",
    "lookup",
    "artifacts",
    "build_on_miss",
    "dispatcher",
    "families",
    "nearest",
    "processes",
    "ranges",
    "snapshot",
    *LAYERS[0],
}
#: Rooms that share a layer and know nothing of each other.
STRANGERS = [{"families", "store"}]
#: Foreign packages by the rooms that may import them, at any depth of their code.
HOMES: dict[str, set[str]] = {
    "alembic": {"store"},
    "fastapi": {"service"},
    "prometheus_client": {"service"},
    "pydantic": {"service"},
    "starlette": {"service"},
    "uvicorn": {"cli", "service"},
    "cuda": {"device", "benchmark", "worker", "gate", "runners", "cli"},
    "jinja2": {"render", "report", "service"},
    "numpy": {"surrogate", "fit", "bench", "report"},
    "nvMatmulHeuristics": {"families"},
    "optuna": {"optuna_sampler", "report"},
    "ray": {"runners"},
    "rich": {"cli"},
    "sklearn": {"report"},
    "scipy": {"bench", "report"},
    "sqlalchemy": {"store"},
    "transformers": {"runtime"},
    "torch": {"families", "runtime", "gate", "benchmark", "worker", "device", "bench", "cli"},
    "triton": {"triton_kernels"},
    "vl_convert": {"report"},
}
#: Imported when their room is: every other foreign import waits inside a function.
AT_ONCE = {
    "alembic": "store",
    "fastapi": "service",
    "jinja2": "render",
    "numpy": "surrogate",
    "prometheus_client": "service",
    "pydantic": "service",
    "sqlalchemy": "store",
    "starlette": "service",
    "torch": "runtime",
    "transformers": "runtime",
    "uvicorn": "service",
}


def room_of(module: str) -> str:
    """``tuner.store.sql`` -> ``store``; the package itself -> the empty text."""
    return ".".join(module.split(".")[1:2])


def modules() -> dict[str, ast.Module]:
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = ["tuner", *file.relative_to(PACKAGE).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(file.read_text())
    return found


MODULES = modules()


def is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST, at_once: bool = False) -> Iterator[str]:
    """Dotted names that `tree` imports; `at_once` leaves out those for types or in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (target(node.module or "", alias.name) for alias in node.names)
        elif at_once and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_typing_only(node)
        ):
            continue
        else:
            yield from imports(node, at_once)


def target(module: str, name: str) -> str:
    """``from tuner import settings`` imports the module, ``from tuner.config import Config``
    a name of one."""
    return f"{module}.{name}" if f"{module}.{name}" in MODULES else module


def own(name: str) -> bool:
    return name.partition(".")[0] == "tuner"


def test_every_module_has_a_room() -> None:
    rooms = {room_of(name) for name in MODULES} - {"", "runtime"}
    assert rooms <= set(LAYER), f"not in the table: {sorted(rooms - set(LAYER))}"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_downward(name: str) -> None:
    room = room_of(name)
    if room == "":  # the package resolves its public names lazily
        assert not [t for t in imports(MODULES[name], at_once=True) if own(t)]
        return
    for wanted in filter(own, imports(MODULES[name])):
        other = room_of(wanted)
        if room == "runtime":
            assert other in RUNTIME_ALLOWED | {""}, f"{name} imports {wanted}"
            continue
        if other == "runtime":
            assert room == "bench", f"{name} imports {wanted}: the runtime stands beside"
            continue  # what times the runtime calls it
        if other == "":
            continue  # tuner itself: the version
        assert LAYER[other] <= LAYER[room], f"{name} imports {wanted}, which lies above it"
        for strangers in STRANGERS:
            assert other == room or not {other, room} <= strangers, f"{name} imports {wanted}"


def test_no_circles() -> None:
    graph = {
        name: {t for t in imports(tree, at_once=True) if t in MODULES and t != "tuner"} - {name}
        for name, tree in MODULES.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph) - 1


@pytest.mark.parametrize("name", sorted(MODULES))
def test_foreign_packages_stay_in_their_rooms(name: str) -> None:
    room = room_of(name)
    for wanted in imports(MODULES[name]):
        package = wanted.partition(".")[0]
        assert room in HOMES.get(package, {room}), f"{name} imports {wanted}"
    for wanted in imports(MODULES[name], at_once=True):
        package = wanted.partition(".")[0]
        if package in HOMES:
            assert AT_ONCE.get(package) == room, f"{name} imports {wanted} when it is imported"


def test_families_are_pure() -> None:
    """At import a family needs the standard library and the words below it alone."""
    import sys

    for name, tree in MODULES.items():
        if room_of(name) == "families":
            for wanted in imports(tree, at_once=True):
                package = wanted.partition(".")[0]
                assert package in sys.stdlib_module_names or own(wanted), f"{name}: {wanted}"


def test_the_reader_of_imports_sees_them() -> None:
    tree = ast.parse(
        "import torch\nfrom tuner.config import Config\nfrom tuner import settings\n"
        "def f():\n    import optuna\n"
        "if TYPE_CHECKING:\n    import jinja2\n"
    )
    assert set(imports(tree)) == {"torch", "tuner.config", "tuner.settings", "optuna", "jinja2"}
    assert set(imports(tree, at_once=True)) == {"torch", "tuner.config", "tuner.settings"}
