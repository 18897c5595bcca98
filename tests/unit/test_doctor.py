from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import sqlite3
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tuner.base import filesystem
from tuner.base.install import extra_command, install_command
from tuner.cli import artifacts, doctor, main
from tuner.compile import dispatcher, prebuilt, toolchain
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.compile.toolchain import Toolchain
from tuner.errors import BenchmarkError, CompileError, ConfigError
from tuner.hardware import GPUS, Gpu
from tuner.measure import device
from tuner.measurement import Environment

PROBE = toolchain.probe


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine where everything is there."""
    tools = Toolchain(Path("/cuda/nvcc"), "13.0.88", Path("/g++"), "g++ 12", Path("/c"), "4.2.0")
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TUNER_STORE", raising=False)
    monkeypatch.setattr(device, "detect", lambda index: GPUS["H200"])
    facts = {"driver": "580.1", "cuda": "13.0"}
    monkeypatch.setattr(device, "environment", lambda index: Environment(facts))
    monkeypatch.setattr(device, "occupants", lambda index: [])
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: (tools.nvcc, tools.nvcc_version))
    monkeypatch.setattr(
        toolchain, "find_host_compiler", lambda: (tools.host_compiler, tools.host_version)
    )
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: (tools.cutlass, tools.cutlass_version))
    monkeypatch.setattr(toolchain, "find_toolchain", lambda: tools)
    monkeypatch.setattr(toolchain, "probe", lambda tools: "")
    return tmp_path


def tuner(*words: str) -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    doctor.register(commands)
    artifacts.register(commands)
    args = parser.parse_args(words)
    return int(args.run(args))


def lines(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, str]:
    """Run the doctor; its lines by name."""
    assert tuner("doctor") == code
    rows = capsys.readouterr().out.splitlines()
    named = {row[8:24].strip(): row[:8].strip() + ": " + row[24:] for row in rows[:-1]}
    return {**named, "verdict": rows[-1]}


def failing(error: Exception | int) -> Any:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(error, os.strerror(error)) if isinstance(error, int) else error

    return fail


NO_NVCC = f"no nvcc >= 12.3 was found (looked in PATH: none): {toolchain.nvcc_help()}"
NO_GPU = (device, "detect", lambda index: None)
NO_COMPILER = (toolchain, "find_nvcc", failing(CompileError(NO_NVCC)))
NO_TOOLS = (toolchain, "find_toolchain", failing(CompileError(NO_NVCC)))
OLD_GPU = Gpu("Tesla T4", "7.5", 40, 1590, 320.0, 1 << 22)
OLD_DRIVER = Environment({"driver": "550.54", "cuda": "12.4"})
CUINIT = "cuInit: CUDA_ERROR_UNKNOWN"


@pytest.mark.parametrize(
    ("changes", "code", "texts"),
    [
        ([NO_GPU], 1, {"GPU": "missing: no CUDA device 0", "verdict": "ranks by predicted time"}),
        (
            [NO_GPU, NO_COMPILER, NO_TOOLS],
            1,
            {
                "nvcc": re.escape(f"missing: {NO_NVCC}".replace("none): ", "none) - ")),
                "verdict": "replays recordings",
            },
        ),
        ([NO_COMPILER, NO_TOOLS], 1, {"verdict": "lookup answers"}),
        (
            [(device, "detect", lambda index: OLD_GPU)],
            1,
            {"GPU": "missing: Tesla T4, compute capability 7.5.* 8.0 and newer"},
        ),
        (
            [(device, "environment", lambda index: OLD_DRIVER)],
            1,
            {"driver": "nvcc 13.0.88 needs a newer driver"},
        ),
        ([(device, "detect", failing(BenchmarkError(CUINIT)))], 1, {"GPU": CUINIT}),
        (
            [(device, "occupants", lambda index: ["pid 7 (train), 512 MiB"])],
            0,
            {"GPU use": r"note: pid 7 \(train\), 512 MiB"},
        ),
        (
            [(doctor, "_version", lambda name: None)],
            1,
            {"cuda-python": f"missing: not installed - {install_command('cuda-core')}"},
        ),
        ([(toolchain, "probe", lambda tools: "fatal: no a.h")], 1, {"compiling": "no a.h"}),
        (
            [(toolchain, "find_nvcc", lambda: (Path("/nvcc"), "12.4.131"))],
            0,
            {"nvcc": r"note: 12.4.131 \(/nvcc\) - 12.8 or newer"},
        ),
        (
            [(toolchain, "find_nvcc", lambda: (Path("/nvcc"), "13.2.86"))],
            0,
            {
                "nvcc": r"note: 13.2.86 \(/nvcc\), and the shipped proofs are of 13.0.88.*"
                f"`tuner prove`.*{re.escape(toolchain.PROVEN_PACKAGES)}"
            },
        ),
        (
            [(filesystem.fcntl, "flock", failing(errno.ENOLCK))],
            1,
            dict.fromkeys(
                ("store", "artifact cache"),
                r"missing: .*is on a file system without locks \(No locks available\)",
            ),
        ),
        (
            [(filesystem.mmap, "mmap", failing(errno.EPERM))],
            1,
            {"artifact cache": "is mounted noexec: libraries there cannot be loaded"},
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_what_a_machine_lacks_is_a_line(
    changes: list[tuple[Any, str, Any]],
    code: int,
    texts: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for change in changes:
        monkeypatch.setattr(*change)
    said = lines(capsys, code)
    for name, text in texts.items():
        assert re.search(text, said[name]), said[name]
    assert (NO_COMPILER in changes) == ("compiling" not in said)


def test_flags_that_nvcc_reads_by_itself_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ccbin=/usr/bin/g++")
    text = lines(capsys, 0)["flags of nvcc"]
    assert text.startswith("note: NVCC_APPEND_FLAGS=-G: kernels of other keys")
    assert "`tuner prove --carry`" in text and "NVCC_PREPEND_FLAGS" not in text


def test_a_complete_machine_can_measure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = lines(capsys, 0)
    assert said["verdict"] == "A sweep can measure here."
    assert said["GPU"].startswith("ok: NVIDIA H200, compute capability 9.0")
    assert said["driver"] == "ok: 580.1 (CUDA 13.0)"
    assert said["nvcc"] == "ok: 13.0.88 (/cuda/nvcc)"
    assert said["torch"].startswith("note: not installed")
    assert said["torch"].endswith(f" - {extra_command('torch')}")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (
            "H200",
            r"\d{3} problems of its own; portfolios made on NVIDIA H200, and on "
            "NVIDIA H100 80GB HBM3, rescaled to this GPU; ",
        ),
        (
            "H100",
            r"\d\d problems of its own, \d{3} of NVIDIA H200; portfolios made on "
            "NVIDIA H100 80GB HBM3, and on NVIDIA H200, rescaled to this GPU; ",
        ),
        (
            "H100-PCIe",
            "0 problems of its own; portfolios made on NVIDIA H100 80GB HBM3, NVIDIA H200, "
            "rescaled to this GPU; ",
        ),
    ],
)
def test_shipped_data_that_serves_is_said(
    name: str, found: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "detect", lambda index: GPUS[name])
    text = f"note: decisions for {found}0 of 0 built kernels are proven - `tuner build"
    assert re.match(text, lines(capsys, 0)["shipped data"])


def test_peers_that_are_missing_are_a_line_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda name: object() if name == "torch" else None
    )
    monkeypatch.setenv("TUNER_PEERS_PATH", str(tmp_path))
    (tmp_path / "deep_gemm_peer.py").write_text("")
    said = lines(capsys, 0)
    assert said["peers"].startswith("ok: deep_gemm deep_gemm_peer ")
    command = install_command("nvidia-cudnn-frontend")
    wanted = f"note: nvidia-cudnn-frontend is not installed - {command}"
    assert said["cudnn_plans"] == wanted


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuner("doctor", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["can_measure"] is True
    by_name = {row["name"]: row for row in data["findings"]}
    assert by_name["CUTLASS"]["state"] == "ok"
    assert by_name["torch"]["state"] == "note"


def test_another_gpu_than_hopper_has_tritons_attention(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu("NVIDIA A100", "8.0", 108, 1410, 1555.0, 1 << 25)
    monkeypatch.setattr(device, "detect", lambda index: gpu)
    monkeypatch.setattr("tuner.base.triton_release.version", lambda: "")
    said = lines(capsys, 0)
    assert said["GPU"].startswith("note: NVIDIA A100, compute capability 8.0")
    assert said["Triton"].startswith("note: Triton 3.6 or newer is not installed, no attention")
    assert said["Triton"].endswith(f" Hopper - {extra_command('triton')}")
    monkeypatch.setattr("tuner.base.triton_release.version", lambda: "3.7.0")
    assert lines(capsys, 0)["Triton"].startswith("ok: 3.7.0")


def test_a_store_that_is_no_database(capsys: pytest.CaptureFixture[str], machine: Path) -> None:
    (machine / "cache").mkdir()
    (machine / "cache" / "store.sqlite").write_bytes(b"not a database" * 100)
    said = lines(capsys, 1)
    assert "file is not a database" in said["store"]
    assert "nothing can be stored" in said["verdict"]


def test_a_cache_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "file").write_text("")
    monkeypatch.setenv("TUNER_CACHE_DIR", str(machine / "file"))
    said = lines(capsys, 1)
    assert said["artifact cache"].startswith("missing: ")
    assert said["store"].startswith("missing: ")


def test_a_damaged_kernel_list_is_said(capsys: pytest.CaptureFixture[str], machine: Path) -> None:
    path = machine / "cache" / "kernels" / "13.0.88-9.0.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"format": "cut')
    said = lines(capsys, 0)["kernel list"]
    assert said.startswith(f"note: kernel list {path}: ") and "remove it, then" in said


def test_the_dispatcher_that_answers_calls(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.11.0", "python": "cpython-312"}
    monkeypatch.setattr(dispatcher, "_facts", lambda: versions)
    (found,) = doctor._dispatcher()
    assert (found.state, found.advice) == ("note", "tuner build")
    assert "none is built for torch 2.11.0, cpython-312" in found.found
    library = machine / "libraries" / "a.so"
    artifact = Artifact("a", library, "ab", None, 0.0)
    monkeypatch.setattr(dispatcher, "find", lambda artifacts: artifact)
    assert [(one.state, one.found) for one in doctor._dispatcher()] == [
        ("ok", "C++, built here, for torch 2.11.0, cpython-312")
    ]
    monkeypatch.setattr(prebuilt, "libraries", lambda: library.parent)
    (found,) = doctor._dispatcher()
    assert found.found == "C++, of the prebuilt kernels, for torch 2.11.0, cpython-312"


def test_without_torch_no_dispatcher_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> dict[str, str]:
        raise CompileError("the dispatcher needs torch")

    monkeypatch.setattr(dispatcher, "_facts", missing)
    assert list(doctor._dispatcher()) == []


def test_looking_makes_nothing(machine: Path) -> None:
    tuner("doctor")
    tuner("cache", "info")
    assert list(machine.iterdir()) == []


def test_a_password_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_STORE", "postgresql+psycopg://me:secret@host/db")
    assert tuner("doctor") == 0
    said = capsys.readouterr().out
    assert "postgresql" in said
    assert "secret" not in said


def test_cache_info_and_prune(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.compile.artifacts.SAFE_AGE_S", -1.0)
    cache = ArtifactCache()
    with cache.workspace() as folder:
        (folder / "a.so").write_bytes(bytes(5_000))
        cache.put("k1", folder / "a.so", resources=None, compile_cpu_s=0, source="", facts={})
    assert tuner("cache", "info", "--json") == 0
    info = json.loads(capsys.readouterr().out)
    assert info == {"folder": str(cache.root), "artifacts": 1, "bytes": cache.total_bytes()}
    for short in (["--json"], ["--json", "info"]):
        assert tuner("cache", *short) == 0
        assert json.loads(capsys.readouterr().out) == info
    assert tuner("cache", "prune") == 0
    assert capsys.readouterr().out.startswith("0 kernels removed, 0 B freed, 5.")
    assert tuner("cache", "prune", "--max-size", "1KB", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "removed": 1,
        "freed_bytes": info["bytes"],
        "bytes": 0,
    }
    assert tuner("cache", "info") == 0
    assert capsys.readouterr().out == f"{cache.root}: 0 kernels, 0 B\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2 * 10**9), ("1.5 MiB", 3 << 19), ("0", 0), ("7b", 7), ("10kb", 10_000)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert artifacts.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "2 apples", "-1GB", "1e3", "2GB2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a size \(allowed: .* as in 2GB\)"):
        artifacts.parse_size(text)


def test_a_full_folder_of_temporary_files(
    capsys: pytest.CaptureFixture[str], machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(machine))
    assert lines(capsys, 0)["TMPDIR"] == f"ok: {machine}"
    monkeypatch.setattr(filesystem.os, "posix_fallocate", failing(errno.ENOSPC))
    said = lines(capsys, 1)
    assert said["TMPDIR"].startswith(f"missing: {machine} is full: it has no room for 67 MB")
    monkeypatch.setenv("TMPDIR", str(machine / "none"))
    assert "none is not a folder - set TMPDIR to one" in lines(capsys, 1)["TMPDIR"]


def test_a_compiler_s_probe_without_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryDirectory", failing(errno.ENOSPC))
    tools = toolchain.find_toolchain()
    assert PROBE(tools) == "no temporary files can be written (No space left on device)"


def test_a_store_that_can_only_be_read(
    capsys: pytest.CaptureFixture[str], machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, connect = machine / "cache" / "store.sqlite", sqlite3.connect
    path.parent.mkdir()
    with contextlib.closing(connect(path)) as connection:
        connection.execute("CREATE TABLE a (b)")
    assert lines(capsys, 0)["store"].endswith("(1 tables, views and indices)")

    def read_only(url: str, **options: Any) -> sqlite3.Connection:
        return connect(url.replace("mode=rw", "mode=ro"), **options)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    assert "cannot be written: give the file and its folder write perm" in lines(capsys, 1)["store"]


def test_a_store_that_another_holds_is_noted(
    capsys: pytest.CaptureFixture[str], machine: Path
) -> None:
    path = machine / "cache" / "store.sqlite"
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE a (b)")
        connection.execute("BEGIN IMMEDIATE")
        assert "is locked by another program" in lines(capsys, 0)["store"]


def test_a_store_whose_driver_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_STORE", "postgresql+pg8000://me:secret@host/db")
    said = lines(capsys, 1)["store"]
    assert said.startswith("missing: store URL 'postgresql+pg8000://me:***@host/db' needs a driver")
    assert extra_command("postgres") in said and "secret" not in said


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite+x://?a=b"]
)
def test_a_store_in_memory_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """It would end with the command, and what was asked for with it."""
    with pytest.raises(SystemExit, match="2"):
        main(["list", "--store", url])
    wanted = f"argument --store: store '{url}' is a database in memory, which ends with the command"
    assert wanted in capsys.readouterr().err
    monkeypatch.setenv("TUNER_STORE", url)
    assert "is a database in memory" in lines(capsys, 1)["store"]
    assert main(["list"]) == 2
