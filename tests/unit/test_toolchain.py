from __future__ import annotations

import importlib
import resource  # noqa: F401 - os.wait4 looks for it, where a test leaves no module path
import sys
from pathlib import Path

import pytest

from tuner.base import resources
from tuner.base.install import install_command
from tuner.compile import toolchain
from tuner.errors import CompileError

VARIABLES = (
    "TUNER_NVCC",
    "CUDA_HOME",
    "CUDA_PATH",
    "TUNER_CUTLASS_DIR",
    "NVCC_CCBIN",
    "CXX",
)


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing: empty PATH, no packages, no variables."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "path").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    for module in ("nvidia", "cutlass_library"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def program(path: Path, output: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    importlib.invalidate_caches()
    return path


def nvcc(path: Path, version: str = "13.0.88") -> Path:
    release = ".".join(version.split(".")[:2])
    return program(path, f"Cuda compilation tools, release {release}, V{version}")


def cutlass(root: Path, major: int = 4, minor: int = 2) -> Path:
    header = root / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text(
        f"#define CUTLASS_MAJOR {major}\n#define CUTLASS_MINOR {minor}\n#define CUTLASS_PATCH 1 \n"
    )
    importlib.invalidate_caches()
    return root


def test_nvcc_is_looked_for_in_order(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [
        (nvcc(bare / "site/nvidia/cu13/bin/nvcc"), "13.0.88"),
        (nvcc(bare / "path/nvcc", "12.9.1"), "12.9.1"),
        (nvcc(bare / "cuda path/bin/nvcc", "12.8.2"), "12.8.2"),
        (nvcc(bare / "home/bin/nvcc", "12.6.3"), "12.6.3"),
        (nvcc(bare / "named", "12.4.4"), "12.4.4"),
    ]
    (bare / "path/nvcc").rename(bare / "path/aside")
    assert toolchain.find_nvcc() == places[0]
    (bare / "path/aside").rename(bare / "path/nvcc")
    assert toolchain.find_nvcc() == places[1]
    monkeypatch.setenv("CUDA_PATH", str(bare / "cuda path"))
    assert toolchain.find_nvcc() == places[2]
    monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
    assert toolchain.find_nvcc() == places[3]
    monkeypatch.setenv("TUNER_NVCC", str(bare / "named"))
    assert toolchain.find_nvcc() == places[4]


def test_the_newest_package_wins(bare: Path) -> None:
    nvcc(bare / "site/nvidia/cu12/bin/nvcc", "12.8.0")
    newest = nvcc(bare / "site/nvidia/cu13/bin/nvcc")
    assert toolchain.find_nvcc() == (newest, "13.0.88")


def test_an_old_nvcc_is_passed_over(bare: Path) -> None:
    nvcc(bare / "path/nvcc", "11.8.89")
    packaged = nvcc(bare / "site/nvidia/cu13/bin/nvcc")
    assert toolchain.find_nvcc() == (packaged, "13.0.88")


def test_without_nvcc_every_place_is_named(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = nvcc(bare / "path/nvcc", "12.2.140")
    monkeypatch.setenv("CUDA_HOME", str(bare / "gone"))
    with pytest.raises(CompileError) as raised:
        toolchain.find_nvcc()
    assert str(raised.value) == (
        f"no nvcc >= 12.3 was found (looked in CUDA_HOME: {bare}/gone/bin/nvcc does not exist, "
        f"CUDA_PATH: none, PATH: {old} is 12.2.140, PyPI packages: none): " + toolchain.nvcc_help()
    )
    folder = str(bare / "prefix" / "tuner-nvcc")
    command = install_command("--target", folder, toolchain.PROVEN_PACKAGES)
    assert command in toolchain.nvcc_help()


def test_the_package_of_cuda_12_has_no_nvcc(bare: Path) -> None:
    program(bare / "site/nvidia/cuda_nvcc/bin/ptxas", "ptxas")
    with pytest.raises(CompileError, match=r"PyPI packages \(nvidia-cuda-nvcc-cu12 has no nvcc\)"):
        toolchain.find_nvcc()


def headers(root: Path, version: int) -> None:
    folder = root / "include"
    folder.mkdir(parents=True)
    (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")


def test_a_compiler_in_a_folder_of_its_own_comes_before_torch_s_packages(bare: Path) -> None:
    """`pip install --target` puts it there: torch's CUDA is not touched, nor meets it."""
    beside_torch = nvcc(bare / "site/nvidia/cu13/bin/nvcc", "13.2.86")
    assert toolchain.find_nvcc() == (beside_torch, "13.2.86")
    own = nvcc(bare / "prefix/tuner-nvcc/nvidia/cu13/bin/nvcc")
    assert toolchain.find_nvcc() == (own, "13.0.88")


def test_an_nvcc_beside_headers_of_another_cuda_is_passed_over(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.15 brings the runtime's headers of CUDA 13.2, in the place of those of 13.0."""
    mixed = nvcc(bare / "prefix/tuner-nvcc/nvidia/cu13/bin/nvcc")
    headers(bare / "prefix/tuner-nvcc/nvidia/cu13", 13020)
    with pytest.raises(CompileError, match=rf"{mixed} is 13\.0\.88, beside headers of CUDA 13\.2"):
        toolchain.find_nvcc()
    monkeypatch.setenv("TUNER_NVCC", str(mixed))
    with pytest.raises(CompileError, match=r"TUNER_NVCC: .* beside headers of CUDA 13\.2"):
        toolchain.find_nvcc()
    monkeypatch.delenv("TUNER_NVCC")
    fitting = nvcc(bare / "site/nvidia/cu13/bin/nvcc", "13.2.86")
    headers(bare / "site/nvidia/cu13", 13020)
    assert toolchain.find_nvcc() == (fitting, "13.2.86")


def test_headers_of_cuda_12_may_be_of_another_release(bare: Path) -> None:
    """Its C++ library does not compare them."""
    older = nvcc(bare / "path/../toolkit/bin/nvcc", "12.6.3")
    headers(bare / "toolkit/targets/x86_64-linux", 12080)
    (bare / "path/nvcc").symlink_to(older)
    assert toolchain.find_nvcc()[1] == "12.6.3"


def test_the_compiler_that_hints_install_is_the_one_of_the_shipped_proofs() -> None:
    names = [path.name for path in (resources.cache() / "proofs").glob("*.json")]
    assert names
    assert all(name.endswith(f"-nvcc-{toolchain.PROVEN_NVCC}.json") for name in names)
    script = (resources.cache().parent / "scripts" / "python.sh").read_text()
    assert f"\ncompiler='{toolchain.PROVEN_PACKAGES}'\n" in script


@pytest.mark.parametrize("what", ["gone", "old", "other"])
def test_a_wrong_tuner_nvcc_is_not_passed_over(
    bare: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    nvcc(bare / "path/nvcc")
    nvcc(bare / "old", "11.8.89")
    program(bare / "other", "hello")
    monkeypatch.setenv("TUNER_NVCC", str(bare / what))
    saying = {"gone": "does not exist", "old": "is 11.8.89", "other": "is not a working nvcc"}
    with pytest.raises(CompileError, match=f"TUNER_NVCC: {bare / what} {saying[what]}"):
        toolchain.find_nvcc()


@pytest.mark.parametrize(("version", "old"), [("12.3.107", True), ("12.8.61", False)])
def test_an_nvcc_may_be_allowed_and_old(version: str, old: bool) -> None:
    assert toolchain.is_old(version) is old


def test_the_packages_need_their_library_folder(bare: Path) -> None:
    packaged = nvcc(bare / "site/nvidia/cu13/bin/nvcc")
    assert toolchain.library_dirs(packaged) == ()
    lib = bare / "site/nvidia/cu13/lib"
    lib.mkdir()
    (lib / "libcudart_static.a").write_text("")
    assert toolchain.library_dirs(packaged) == (lib,)
    (bare / "site/nvidia/cu13/lib64").mkdir()  # a toolkit: nvcc knows it
    assert toolchain.library_dirs(packaged) == ()


def test_a_link_to_nvcc_is_followed_to_its_libraries(bare: Path) -> None:
    packaged = nvcc(bare / "site/nvidia/cu13/bin/nvcc")
    lib = bare / "site/nvidia/cu13/lib"
    lib.mkdir()
    (lib / "libcudart_static.a").write_text("")
    (bare / "path/nvcc").symlink_to(packaged)
    assert toolchain.library_dirs(bare / "path/nvcc") == (lib,)


def test_the_host_compiler_is_looked_for_in_order(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CompileError, match=r"looked in NVCC_CCBIN, CXX, g\+\+ on PATH"):
        toolchain.find_host_compiler()
    gxx = program(bare / "path/g++", "g++ 12.2.0")
    assert toolchain.find_host_compiler() == (gxx, "g++ 12.2.0")
    clang = program(bare / "path/clang++", "clang 19")
    monkeypatch.setenv("CXX", "clang++")
    assert toolchain.find_host_compiler() == (clang, "clang 19")
    other = program(bare / "g++-13", "g++ 13.1.0")
    monkeypatch.setenv("NVCC_CCBIN", str(other))
    assert toolchain.find_host_compiler() == (other, "g++ 13.1.0")
    monkeypatch.setenv("NVCC_CCBIN", "ccache g++")
    with pytest.raises(CompileError, match=r"NVCC_CCBIN=ccache g\+\+ is not a program that runs"):
        toolchain.find_host_compiler()


def test_cutlass_is_the_checkout_or_the_wheel(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match="nvidia-cutlass package: not installed"):
        toolchain.find_cutlass()
    wheel = cutlass(bare / "site/cutlass_library/source")
    (bare / "site/cutlass_library/__init__.py").write_text("raise RuntimeError('imported')")
    assert toolchain.find_cutlass() == (wheel, "4.2.1")
    checkout = cutlass(bare / "checkout", minor=3)
    monkeypatch.setenv("TUNER_CUTLASS_DIR", str(checkout))
    assert toolchain.find_cutlass() == (checkout, "4.3.1")


def test_a_wrong_checkout_is_named(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cutlass(bare / "site/cutlass_library/source")
    monkeypatch.setenv("TUNER_CUTLASS_DIR", str(bare / "gone"))
    with pytest.raises(CompileError, match=r"TUNER_CUTLASS_DIR: no .*gone/include/cutlass/version"):
        toolchain.find_cutlass()
    monkeypatch.setenv("TUNER_CUTLASS_DIR", str(cutlass(bare / "old", 3, 9)))
    with pytest.raises(CompileError, match=r"CUTLASS 3\.9\.1 .*is too old \(allowed: >= 4\.2\)"):
        toolchain.find_cutlass()


def test_an_edited_header_changes_the_digest(bare: Path) -> None:
    one, two = cutlass(bare / "one"), cutlass(bare / "two")
    assert toolchain.headers_digest(one) == toolchain.headers_digest(two)
    (two / "examples/88_hopper_fmha").mkdir(parents=True)
    (two / "examples/88_hopper_fmha/new.hpp").write_text("// new")
    assert toolchain.headers_digest(one) != toolchain.headers_digest(two)


def test_all_that_is_missing_is_said_at_once(bare: Path) -> None:
    with pytest.raises(CompileError) as raised:
        toolchain.find_toolchain()
    assert all(word in str(raised.value) for word in ("no nvcc", "no host C++", "CUTLASS was not"))


def test_a_complete_machine_is_found(bare: Path) -> None:
    tools = nvcc(bare / "path/nvcc"), program(bare / "path/g++", "g++ 12.2.0")
    root = cutlass(bare / "site/cutlass_library/source")
    found = toolchain.find_toolchain()
    assert (found.nvcc, found.host_compiler, found.cutlass) == (*tools, root)
    assert (found.nvcc_version, found.host_version, found.cutlass_version) == (
        "13.0.88",
        "g++ 12.2.0",
        "4.2.1",
    )
    assert len(found.cutlass_digest) == 64


def test_the_probe_says_what_the_compiler_said(bare: Path) -> None:
    nvcc(bare / "path/nvcc"), program(bare / "path/g++", "g++ 12.2.0")
    cutlass(bare / "site/cutlass_library/source")
    found = toolchain.find_toolchain()
    assert toolchain.probe(found) == ""
    found.nvcc.write_text("#!/bin/sh\necho 'x.h:1: fatal error: crt/host_config.h' >&2\nexit 1\n")
    assert toolchain.probe(found) == "x.h:1: fatal error: crt/host_config.h"
