"""Commands that hints name: they work for the installation that prints them."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from programs import ran

from tuner.base import install, resources
from tuner.base.install import extra_command, install_command
from tuner.base.processes import python_environment

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkout_is_installed_by_its_path() -> None:
    assert shlex.split(extra_command("report")) == [
        *(sys.executable, "-m", "pip", "install"),
        *("-e", f"{ROOT}[report]"),
    ]


def test_an_installed_wheel_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "site-packages" / "tuner")
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python")
    assert extra_command("report") == (
        "'/opt/my env/bin/python' -m pip install 'cutlass-tuner[report]'"
    )
    assert install_command("cuda-core") == "'/opt/my env/bin/python' -m pip install cuda-core"


def _calls(tree: ast.AST) -> list[str]:
    """Extras that a module names in calls of `extra_command`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "extra_command":
            [argument] = node.args
            found += [argument.value] if isinstance(argument, ast.Constant) else []
    return [str(name) for name in found]


def test_every_hint_names_an_extra_that_exists_and_no_bare_pip() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named: set[str] = set()
    bare = []
    for path in sorted((ROOT / "tuner").rglob("*.py")):
        source = path.read_text()
        if "pip" not in source and "extra_command" not in source:
            continue
        tree = ast.parse(source)
        named |= set(_calls(tree))
        texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
        if any(isinstance(text, str) and re.search(r"pip install\b", text) for text in texts):
            bare.append(path.relative_to(ROOT).as_posix())
    assert named
    assert named <= set(project["optional-dependencies"])
    assert project["name"] == install.DISTRIBUTION
    assert bare == []


@pytest.mark.parametrize(
    ("code", "start"),
    [
        ("tuner.linear", "tuner.linear: tuner.runtime needs PyTorch ("),
        ("import tuner.runtime", "tuner.runtime needs PyTorch ("),
    ],
)
def test_without_torch_the_command_is_named(code: str, start: str) -> None:
    script = f"import sys, tuner; sys.modules['torch'] = None; {code}"
    done = ran(sys.executable, "-P", "-c", script, code=1, env=python_environment())
    line = done.stderr.splitlines()[-1].removeprefix("ImportError: ")
    assert line.startswith(start)
    assert line.endswith(f"`{extra_command('torch')}`")


def test_without_transformers_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    name = "tuner.runtime.engines.transformers"
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(name)
    line = str(caught.value)
    assert line.startswith(f"{name} needs Transformers 5 (")
    assert line.endswith(f"`{extra_command('transformers')}`")
