"""A wheel carries everything that a checkout has, and reads it from inside the package."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from programs import ran

import tuner
from tuner.base import resources

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DATA = ("templates", "cache")


def data_files(folder: Path) -> set[str]:
    """Relative names of the data files, without what running Python leaves."""
    files = (f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    return {f.relative_to(folder).as_posix() for f in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy: a build leaves files in its tree."""
    try:
        from setuptools import __version__ as version
    except ImportError:
        pytest.skip("setuptools is not installed")
    if int(version.partition(".")[0]) < 77:
        pytest.skip(f"setuptools {version} is older than the 77 that pyproject.toml asks for")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("tuner", *DATA):
        shutil.copytree(ROOT / name, tree / name, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "build" / "lib" / "tuner").mkdir(parents=True)
    (tree / "build" / "lib" / "tuner" / "gone.py").write_text("")
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    done = ran(sys.executable, "-c", code, cwd=tree)
    return out / done.stdout.splitlines()[-1]


def test_the_wheel_holds_the_whole_tree(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in DATA:
        wanted = {f"tuner/_data/{name}/{file}" for file in data_files(ROOT / name)}
        assert "tuner/gone.py" not in names, "a former build's"
        assert wanted <= names, f"left out: {sorted(wanted - names)}"
    # What lies beside the code belongs to it, but for what is written for who changes it.
    code = {
        f"tuner/{file}" for file in data_files(ROOT / "tuner") if Path(file).name != "README.md"
    }
    assert code <= names, f"left out: {sorted(code - names)}"
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"tuner", f"cutlass_tuner-{tuner.__version__}.dist-info"}


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Path:
    """A folder with the wheel's content, as pip lays it out."""
    folder = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def printed(code: str, site: Path) -> str:
    """What a program prints that imports from `site` and not from the checkout."""
    done = ran(
        sys.executable,
        "-I",
        "-c",
        f"import sys; sys.path.insert(0, sys.argv[1])\n{code}",
        site,
        cwd=site.parent,
    )
    return done.stdout


def test_an_installed_wheel_answers_a_shape_that_nobody_tuned(site: Path) -> None:
    code = (
        "import tuner\n"
        "for problem in tuner.GemmProblem(300, 4096, 4096), 'S=1999,D=64,H=1':\n"
        "    answer = tuner.lookup(problem, gpu='H200')\n"
        "    print(answer.kind)\n"
        "print(answer.selected.regret.problems > 0, tuner.__file__)"
    )
    found = ["portfolio", "portfolio", "True", str(site / "tuner" / "__init__.py")]
    assert printed(code, site).split() == found


def test_an_installed_wheel_reads_its_own_data(site: Path) -> None:
    code = (
        "import json\n"
        "from tuner.base import resources\n"
        "print(json.dumps([str(resources.templates()), str(resources.cache())]))"
    )
    for name, found in zip(DATA, json.loads(printed(code, site)), strict=True):
        assert Path(found) == site / "tuner" / "_data" / name
        assert data_files(Path(found)) == data_files(ROOT / name)


def test_a_checkout_reads_the_data_where_it_lies() -> None:
    assert resources.templates() == ROOT / "templates"
    assert resources.cache() == ROOT / "cache"


def test_every_folder_of_code_is_packaged() -> None:
    folders = {f.parent.relative_to(ROOT) for f in (ROOT / "tuner").rglob("*.py")}
    found = {".".join(folder.parts) for folder in folders}
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == found | {f"tuner._data.{name}" for name in DATA}


def test_every_foreign_import_is_declared() -> None:
    names = {"yaml": "pyyaml", "cuda": "cuda-bindings", "cutlass_library": "nvidia-cutlass"}
    names |= {"nvMatmulHeuristics": "nvidia-matmul-heuristics"}
    names |= {"prometheus_client": "prometheus-client", "sklearn": "scikit-learn"}
    names |= {"vl_convert": "vl-convert-python"}
    extras = PROJECT["project"]["optional-dependencies"]
    used = [line for name, lines in extras.items() if name != "dev" for line in lines]
    declared = {
        re.match(r"[\w-]+", line)[0]  # type: ignore[index]
        for line in [
            *PROJECT["build-system"]["requires"],
            *PROJECT["project"]["dependencies"],
            *used,
        ]
    }
    for file in (ROOT / "tuner").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for package in {module.partition(".")[0] for module in modules}:
                if package in ("sglang", "vllm") and file.parent.name == package:
                    continue  # it loads its plug-in
                if package not in sys.stdlib_module_names and package != "tuner":
                    assert names.get(package, package) in declared, f"{file}: {package}"


def test_versions_of_tools_are_pinned() -> None:
    tools = PROJECT["project"]["optional-dependencies"]["dev"]
    # Its own extras are what it tests; their versions are a user's.
    own = ("setuptools>=", "cutlass-tuner[")
    loose = [tool for tool in tools if "==" not in tool and not tool.startswith(own)]
    assert not loose


def test_the_compiler_s_extra_takes_the_cuda_that_torch_pins() -> None:
    """torch pins one release of cuda-toolkit, 13.0.2 or 13.2.2; another pin would replace its
    runtime, or torch.
    """
    [wanted] = PROJECT["project"]["optional-dependencies"]["nvcc"]
    requirement = Requirement(wanted)
    assert requirement.name == "cuda-toolkit"
    assert requirement.extras == {"cccl", "crt", "cudart", "nvcc", "nvvm"}
    assert all(version in requirement.specifier for version in ("13.0.2", "13.2.2"))
    assert "12.9.1" not in requirement.specifier


@pytest.mark.parametrize("script", ["setup", "check", "test", "test-gpu", "tuner", "wheelhouse"])
def test_scripts_are_sound(script: str) -> None:
    file = ROOT / "scripts" / script
    text = file.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text
    assert file.stat().st_mode & 0o111, "not executable"
    subprocess.run(["bash", "-n", str(file)], check=True)


FAKES = {
    "python.sh": "top=$PWD python=$PWD/python",
    "setup": "echo setup",
    "check": "echo check; exit $CHECK",
    "test": "echo test; exit $TEST",
    "../python": """
        case "$*" in
          *tests/compile*) echo "compile $*"; exit $COMPILE;;
          *tests/unit/test_a.py*) echo "first $*"; exit $FIRST;;
          *tests/unit/test_words.py*) echo "third $*"; exit $THIRD;;
          *) echo "second $*"; exit $SECOND;;
        esac""",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts of continuous integration over fakes of what they run."""
    for folder in ("scripts", ".ci", "tests/unit"):
        (tmp_path / folder).mkdir(parents=True)
    for name, text in FAKES.items():
        (tmp_path / "scripts" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "scripts" / name).chmod(0o755)
    for file in (ROOT / "tests" / "unit").glob("test_*.py"):
        (tmp_path / "tests" / "unit" / file.name).touch()
    for name, text in (("a", ""), ("tensors", "import torch\n"), ("words", '"torch"\n')):
        (tmp_path / "tests" / "unit" / f"test_{name}.py").write_text(text)
    return tmp_path


def run(
    checkout: Path, script: str, *arguments: str, **codes: int
) -> subprocess.CompletedProcess[str]:
    variables = {name: str(codes.get(name, 0)) for name in FAILURES}
    return ran(
        "bash",
        script,
        *arguments,
        code=None,
        cwd=checkout,
        env={"PATH": os.environ["PATH"], "PYTHON": str(checkout / "python"), **variables},
    )


FAILURES = ("CHECK", "TEST", "FIRST", "SECOND", "THIRD", "COMPILE")


def test_ci_checks_and_tests_and_either_may_fail_it(checkout: Path) -> None:
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    done = run(checkout, ".ci/run")
    assert (done.stdout.split(), done.returncode) == (["setup", "test", "check"], 0), done.stderr
    for failing in ("CHECK", "TEST"):
        done = run(checkout, ".ci/run", **{failing: 3})
        assert (done.stdout.split(), done.returncode) == (["setup", "test", "check"], 3)


def test_every_test_is_run_once_and_any_may_fail_the_run(checkout: Path) -> None:
    shutil.copy(ROOT / "scripts" / "test", checkout / "scripts" / "test")
    done = run(checkout, "scripts/test")
    setup, *lines = done.stdout.splitlines()
    assert (setup, done.returncode) == ("setup", 0), done.stderr
    said = {words[0]: words[1:] for words in map(str.split, lines)}
    assert said["compile"] == ["-P", "-m", "pytest", "tests/compile"]
    parts = ("first", "second", "third")
    files = [word for part in parts for word in said[part] if word.endswith(".py")]
    everything = sorted((checkout / "tests" / "unit").glob("test_*.py"))
    assert sorted(files) == [str(file.relative_to(checkout)) for file in everything]
    for failing in ("FIRST", "SECOND", "THIRD", "COMPILE"):
        assert run(checkout, "scripts/test", **{failing: 3}).returncode == 3


@pytest.mark.parametrize(
    ("script", "folders"), [("test", ["tests/unit", "tests/compile"]), ("test-gpu", ["tests/gpu"])]
)
def test_files_that_are_named_are_run_in_place_of_all(
    checkout: Path, script: str, folders: list[str]
) -> None:
    shutil.copy(ROOT / "scripts" / script, checkout / "scripts" / script)
    name = f"scripts/{script}"
    for arguments in (["tests/unit/test_b.py::test_one", "-x"], ["-x", "tests/gpu"]):
        assert run(checkout, name, *arguments).stdout.split()[-len(arguments) :] == arguments
        assert not {*folders} & {*run(checkout, name, "tests/other").stdout.split()}
    found = run(checkout, name, "-k", "tests").stdout.split()
    assert found[-len(folders) - 2 :] == [*folders, "-k", "tests"]


def test_the_command_installs_its_compiler_beside_torch(checkout: Path) -> None:
    """Either order of torch and compiler in one environment has failed or replaced one of them."""
    for name in ("tuner", "python.sh"):
        shutil.copy(ROOT / "scripts" / name, checkout / "scripts" / name)
    (checkout / "pyproject.toml").write_text("")
    fakes = {
        ".venv/bin/python": f"""
            case "$*" in
              *find_spec*) exit 1;;  # no torch
              *pip\\ install*) echo "$*" >> {checkout}/pip;;
            esac""",
        ".venv/bin/tuner": "echo tuner",
        "path/nvidia-smi": "echo GPU 0",
    }
    for name, text in fakes.items():
        file = checkout / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
    for tool in ("bash", "env", "cat", "cksum", "tr", "rm", "touch", "dirname", "grep"):
        (checkout / "path" / tool).symlink_to(str(shutil.which(tool)))
    done = ran(checkout / "scripts" / "tuner", code=None, env={"PATH": str(checkout / "path")})
    assert (done.returncode, done.stdout) == (0, "tuner\n"), done.stderr
    compiler, core, torch = (checkout / "pip").read_text().splitlines()
    assert f"--target {checkout}/.venv/tuner-nvcc cuda-toolkit[" in compiler
    assert core.endswith("--editable .")
    assert torch.endswith(".[torch]")
