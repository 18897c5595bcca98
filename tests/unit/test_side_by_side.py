"""The script that compiles both halves of a unit at once, run over stand-ins for its tools."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tuner.compile import side_by_side

TOOL = """#!/bin/sh
# Notes its name, and writes the file behind --module_id_file_name where it generates the id.
name=$(basename "$0"); echo "$name $FOO" >> {log}; id= ; last=
for one in "$@"; do
  case $last in --module_id_file_name) [ -n "$id" ] && cat {folder}/$name.id > "$one" ;; esac
  [ "$one" = --gen_module_id_file ] && id=1
  last=$one
done
[ ! -e {folder}/$name.fails ]
"""


@pytest.fixture
def dry_run(tmp_path: Path) -> str:
    """Output of nvcc --dryrun, with stand-ins for the programs."""
    for name in ("g++", "cudafe++", "cicc", "ptxas", "fatbinary", "nvlink", "nvcc"):
        tool = tmp_path / name
        tool.write_text(TOOL.format(log=tmp_path / "log", folder=tmp_path))
        tool.chmod(0o755)
        (tmp_path / f"{name}.id").write_text("_12345678_7_unit_cu_k")
    ids = f'--module_id_file_name "{tmp_path}/unit.module_id"'
    lines = (
        "_SPACE_= ",
        f"PATH={tmp_path}:/usr/bin:/bin",
        f"CICC_PATH={tmp_path}",
        'LIBRARIES=  "-L/lib/stubs" "-L/lib"',
        f'"{tmp_path}"/g++ -std=c++17 -E -x c++ -D "A=1" unit.cu -o unit.cpp4.ii',
        f"cudafe++ --gen_module_id_file {ids} unit.cpp4.ii",
        f'"{tmp_path}"/g++ -E -x c++ unit.cu -o unit.cpp1.ii',
        f'"$CICC_PATH/cicc" {ids} unit.cpp1.ii -o unit.ptx',
        "ptxas -arch=sm_90a unit.ptx -o unit.cubin",
        "fatbinary -64 unit.cubin",
        "rm unit.fatbin",
        f'"{tmp_path}"/g++ -c -x c++ unit.cudafe1.cpp -o unit.o',
        "nvlink -m64 unit.o",
    )
    return "noise\n" + "".join(f"#$ {line}\n" for line in lines)


def ran(tmp_path: Path, dry_run: str) -> tuple[int, list[str]]:
    """Exit status of the script, and the tools that it started."""
    script = side_by_side.script([f"{tmp_path}/nvcc", "unit.cu"], dry_run)
    assert script is not None
    status = subprocess.run(["/bin/sh", "-c", script], cwd=tmp_path, check=False).returncode
    return status, (tmp_path / "log").read_text().split()


def test_every_step_runs_once_and_the_halves_come_first(tmp_path: Path, dry_run: str) -> None:
    status, tools = ran(tmp_path, dry_run)
    assert status == 0
    assert tools[-2:] == ["g++", "nvlink"]
    assert sorted(tools[:-2]) == ["cicc", "cudafe++", "fatbinary", "g++", "g++", "ptxas"]


@pytest.mark.parametrize("tool", ["cudafe++", "cicc", "ptxas", "nvlink"])
def test_a_step_that_fails_fails_the_script(tmp_path: Path, dry_run: str, tool: str) -> None:
    (tmp_path / f"{tool}.fails").touch()
    status, tools = ran(tmp_path, dry_run)
    assert status == 1
    assert ("nvlink" in tools) == (tool == "nvlink")


def test_halves_that_name_symbols_differently_are_compiled_by_nvcc(
    tmp_path: Path, dry_run: str
) -> None:
    (tmp_path / "cicc.id").write_text("_87654321_7_unit_cu_k")
    status, tools = ran(tmp_path, dry_run)
    assert (status, tools[-1]) == (0, "nvcc")
    assert "nvlink" not in tools


def test_unknown_steps_are_left_to_nvcc(dry_run: str) -> None:
    command = ["nvcc", "unit.cu"]
    assert side_by_side.script(command, "") is None
    assert side_by_side.script(command, dry_run.replace("ptxas", "other")) is None
    assert side_by_side.script(command, dry_run.replace("--module_id_file_name", "--id")) is None


@pytest.mark.parametrize("failing", ["", "host", "device", "rest"])
def test_two_halves_come_before_the_rest(tmp_path: Path, failing: str) -> None:
    def steps(name: str) -> list[list[str]]:
        ends = "false" if name == failing else "true"
        return [["/bin/sh", "-c", f"echo {name} >> log; {ends}"], ["/bin/sh", "-c", "true 'a b'"]]

    script = side_by_side.together(steps("host"), steps("device"), steps("rest"))
    status = subprocess.run(["/bin/sh", "-c", script], cwd=tmp_path, check=False).returncode
    done = (tmp_path / "log").read_text().split()
    assert status == (1 if failing else 0)
    assert ("rest" in done) == (failing in ("", "rest"))
    assert "device" in done
    if not failing:
        assert sorted(done[:2]) == ["device", "host"] and done[2:] == ["rest"]
