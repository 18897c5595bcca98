"""Direction of the imports, read from the source: a package imports from those below it."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import tuner
from tuner.families import MODULES as FAMILIES
from tuner.families import families

PACKAGE = Path(tuner.__file__).parent

#: Packages and single modules of `tuner`, lowest first: each imports from those before it. So do
#: imports inside functions and those for types.
ORDER: tuple[str, ...] = (
    "errors",
    "settings",
    "config",
    "base",
    "hardware",
    "problem",
    "measurement",
    "families",
    "store",
    "compile",
    "selection",
    "measure",
    "runners",
    "search",
    "tuning",
    "bundle",
    "runtime",
    "bench",
    "report",
    "service",
    "cli",
    "__main__",
)
LEVEL = {name: level for level, name in enumerate(ORDER)}
#: Pairs of packages that know nothing of each other.
STRANGERS = [{"families", "store"}, {"compile", "store"}, {"bundle", "tuning"}]
#: A model's calls read these beside `runtime` itself, and nothing above `runtime` but `tuner`
#: imports it.
RUNTIME_READS = (
    *ORDER[: ORDER.index("store")],
    "compile.artifacts",
    "compile.background",
    "compile.dispatcher",
    "compile.loading",
    "compile.single",
    "measure.rounds",
    "measure.tolerance",
    "selection",
)
#: Not loaded by any module that `runtime` loads when it is imported.
NOT_IN_RUNTIME = {"alembic", "jinja2", "optuna", "ray", "sqlalchemy"}
#: Foreign packages by the places that may import them, at any depth of their code.
ALLOWED_IN: dict[str, set[str]] = {
    "alembic": {"store"},
    "cuda": {
        "cli.doctor",
        "measure.subjects",
        "measure.device",
        "measure.gate",
        "measure.worker",
        "runners",
    },
    "fastapi": {"service"},
    "jinja2": {"compile.render", "report", "service"},
    "numpy": {"bench", "report", "search.fits", "search.rates", "search.surrogate"},
    "nvMatmulHeuristics": {"families"},
    "optuna": {"report", "search.journal", "search.samplers", "search.storage"},
    "prometheus_client": {"service"},
    "pydantic": {"service"},
    "ray": {"runners"},
    "rich": {"cli"},
    "scipy": {"families.fitting", "report", "search.rates"},
    "sklearn": {"report"},
    "sqlalchemy": {"search.storage", "store"},
    "starlette": {"service"},
    "torch": {
        "bench",
        "cli",
        "families",
        "measure.subjects",
        "measure.device",
        "measure.gate",
        "measure.worker",
        "problem.traced",
        "runtime",
    },
    "transformers": {"problem.traced", "runtime"},
    "triton": {"compile.triton_compiler", "runtime.engines.norms"},
    "uvicorn": {"cli", "service"},
    "vl_convert": {"report"},
    "vllm": {"runtime"},
}
#: Imported when their place is: every other foreign import waits inside a function.
AT_ONCE: dict[str, set[str]] = {
    "alembic": {"store"},
    "fastapi": {"service"},
    "jinja2": {"compile.render"},
    "numpy": {"search.surrogate"},
    "optuna": {"search.journal", "search.samplers", "search.storage"},
    "prometheus_client": {"service"},
    "pydantic": {"service"},
    "sqlalchemy": {"search.storage", "store"},
    "starlette": {"service"},
    "torch": {"problem.traced", "runtime"},
    "transformers": {"problem.traced", "runtime"},
    "triton": {"runtime.engines.norms"},
    "uvicorn": {"service"},
    "vllm": {"runtime"},
}


def place_of(module: str) -> str:
    """``tuner.store.sql`` -> ``store``; the package itself -> the empty text."""
    return ".".join(module.split(".")[1:2])


def lies_in(module: str, places: tuple[str, ...] | set[str]) -> bool:
    """Whether a module is one of some places of `tuner`, or lies in one."""
    name = module.partition(".")[2]
    return any(name == place or name.startswith(f"{place}.") for place in places)


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


def wrong_direction(modules: Mapping[str, ast.AST]) -> list[str]:
    """Every import that points upward, or between packages that know nothing of each other."""
    found = []
    for name, tree in modules.items():
        place = place_of(name)
        for wanted in sorted(set(filter(own, imports(tree, at_once=place == "")))):
            other = place_of(wanted)
            if place == "":  # the package resolves its public names lazily
                wrong = True
            elif other in ("", place):  # `tuner` itself: the version
                wrong = False
            elif place == "runtime":
                wrong = not lies_in(wanted, RUNTIME_READS)
            else:
                wrong = LEVEL[other] > LEVEL[place] or other == "runtime"
                wrong = wrong or any({place, other} == pair for pair in STRANGERS)
            if wrong:
                found.append(f"{name} imports {wanted}")
    return found


def circle(modules: Mapping[str, ast.AST]) -> list[str]:
    """The modules of one circle of imports, empty where there is none. Imports inside functions and
    those for types count.
    """
    graph = {
        name: {t for t in imports(tree) if t in modules and t != "tuner"} - {name}
        for name, tree in modules.items()
        if name != "tuner"
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as exc:
        return list(exc.args[1])
    return []


def test_every_module_has_a_place() -> None:
    places = {place_of(name) for name in MODULES} - {""}
    assert places == set(ORDER)


def test_imports_point_downward() -> None:
    assert wrong_direction(MODULES) == []


def test_packages_of_the_runtime_point_one_way() -> None:
    """Attention and its gradients know each other; what a program switches on stands above all."""
    below = {
        "call": set(),
        "attention": {"call", "training"},
        "training": {"call", "attention"},
        "products": {"call", "training"},
        "parallel": {"call"},
        "engines": {"call", "attention", "products", "parallel"},
    }
    arrows: dict[str, set[str]] = {}
    for name, tree in MODULES.items():
        package = name.removeprefix("tuner.runtime.").partition(".")[0]
        if package in below and name != f"tuner.runtime.{package}":
            others = {wanted.split(".")[2] for wanted in imports(tree) if in_runtime(wanted)}
            arrows.setdefault(package, set()).update(others - {package})
    assert arrows == below


def in_runtime(name: str) -> bool:
    return name.startswith("tuner.runtime.")


def test_no_circles() -> None:
    assert circle(MODULES) == []


def test_foreign_packages_stay_in_their_places() -> None:
    found = []
    for name, tree in MODULES.items():
        for wanted in imports(tree):
            package = wanted.partition(".")[0]
            if package in ALLOWED_IN and not lies_in(name, ALLOWED_IN[package]):
                found.append(f"{name} imports {wanted}")
        for wanted in imports(tree, at_once=True):
            package = wanted.partition(".")[0]
            if package in ALLOWED_IN and not lies_in(name, AT_ONCE.get(package, set())):
                found.append(f"{name} imports {wanted} when it is imported")
    assert found == []


def test_what_a_model_calls_loads_no_heavy_package() -> None:
    """Through all modules that are loaded with `tuner.runtime`."""
    seen: set[str] = set()
    left = [name for name in MODULES if place_of(name) == "runtime"]
    while left:
        name = left.pop()
        seen.add(name)
        for wanted in imports(MODULES[name], at_once=True):
            assert wanted.partition(".")[0] not in NOT_IN_RUNTIME, f"{name} imports {wanted}"
            if wanted in MODULES and wanted not in seen:
                left.append(wanted)
    assert {"tuner.selection", "tuner.compile.artifacts"} & seen


def test_families_are_pure() -> None:
    """At import a family needs the standard library and the packages below it only."""
    for name, tree in MODULES.items():
        if place_of(name) == "families":
            for wanted in imports(tree, at_once=True):
                package = wanted.partition(".")[0]
                assert package in sys.stdlib_module_names or own(wanted), f"{name}: {wanted}"


def test_no_family_is_named_outside_of_the_families() -> None:
    """But by an operation or a public function of its name: elsewhere its own facts count."""
    operations = {member.op for member in families().values()}
    own_names = {module for module in FAMILIES if "." not in module} - operations
    words = re.compile(rf"\b({'|'.join(own_names - set(tuner.__all__))})\b")
    named = {
        file.relative_to(PACKAGE).as_posix(): match[0]
        for file in PACKAGE.rglob("*.py")
        if place_of(".".join(file.relative_to(PACKAGE.parent).parts)) != "families"
        and (match := words.search(file.read_text()))
    }
    assert named == {}
    imported = re.compile(rf"families\.({'|'.join(map(re.escape, FAMILIES))})\b")
    named = {
        name: match[0]
        for name, tree in MODULES.items()
        if place_of(name) != "families"
        for wanted in imports(tree)
        if "peers" not in wanted and (match := imported.search(wanted))
    }
    assert named == {}


def test_the_reader_of_imports_sees_them() -> None:
    tree = ast.parse(
        "import torch\nfrom tuner.config import Config\nfrom tuner import settings\n"
        "def f():\n    import optuna\n"
        "if TYPE_CHECKING:\n    import jinja2\n"
    )
    assert set(imports(tree)) == {"torch", "tuner.config", "tuner.settings", "optuna", "jinja2"}
    assert set(imports(tree, at_once=True)) == {"torch", "tuner.config", "tuner.settings"}


def test_wrong_imports_are_found() -> None:
    upward = {
        "tuner.base.output": ast.parse("def f():\n    from tuner.cli import sweep"),
        "tuner.store": ast.parse("from tuner.families import base"),
        "tuner.cli.build": ast.parse("from tuner.runtime.call.table import table"),
        "tuner.runtime.call.plan": ast.parse("from tuner.compile import compiler"),
        "tuner.report.page": ast.parse("from tuner.bench.results import Results"),
    }
    assert wrong_direction(upward) == [
        "tuner.base.output imports tuner.cli.sweep",
        "tuner.store imports tuner.families.base",
        "tuner.cli.build imports tuner.runtime.call.table",
        "tuner.runtime.call.plan imports tuner.compile.compiler",
    ]


def test_a_circle_is_found() -> None:
    tied = {
        "tuner.store.records": ast.parse("from tuner.store.sql import Store"),
        "tuner.store.sql": ast.parse("def f():\n    import tuner.store.records"),
    }
    assert set(circle(tied)) == set(tied)


def test_no_two_public_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for tree in MODULES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    )
    found = {name for name, count in names.items() if count > 1 and not name.startswith("_")}
    assert found == set()
