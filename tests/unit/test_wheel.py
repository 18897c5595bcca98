"""The wheel of prebuilt kernels: what is in it, and what an installation of it answers."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tuner
from tuner.base import resources
from tuner.bundle.wheel import PACKAGE, Wheel, main, newest_glibc, write_package, write_wheels
from tuner.cli.doctor import _prebuilt
from tuner.compile import dispatcher, prebuilt
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.loading import load
from tuner.errors import ConfigError
from tuner.families.base import KernelSpec
from tuner.selection.kernel_list import Kernel, KernelList, Proof

PROOF = Proof(64, 0, "NVIDIA H200", "580.159.04", "2026-11-23")
LIBRARY = """
int tuner_prebuilt1_workspace(long const* n, long* bytes) { *bytes = n[0]; return 0; }
int tuner_prebuilt1_launch(void* const* t, long const* n, double const* s, void* w, void* stream) {
  return 0;
}
"""


def spec(tile: int) -> KernelSpec:
    return KernelSpec("softmax.cu.j2", {"tile": tile})


def put(cache: ArtifactCache, library: Path, key: str, compile_cpu_s: float = 1.0) -> str:
    facts = {"template": "toy.cu.j2", "nvcc": "13.0.88", "host_compiler": "g++ 12.2"}
    made = cache.put(
        key, library, resources=None, compile_cpu_s=compile_cpu_s, source="int x;", facts=facts
    )
    return made.sha256


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with a kernel's C functions."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("library")
    (folder / "k.c").write_text(LIBRARY)
    command = ["cc", "-shared", "-fPIC", "-o", "k.so", "k.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "k.so"


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "artifacts")


def filled(cache: ArtifactCache, library: Path) -> KernelList:
    """A proven kernel and one without a proof."""
    source = resources.template_digest("softmax.cu.j2")
    digest = put(cache, library, "prebuilt1")
    proven = Kernel(spec(64).key, "prebuilt1", digest, PROOF, source=source)
    other = Kernel(spec(128).key, "k2", put(cache, library, "k2"))
    return KernelList("13.0.88", "4.2.0", "9.0").with_kernels([proven, other])


@pytest.fixture
def known(cache: ArtifactCache, library: Path) -> KernelList:
    return filled(cache, library)


def write_wheel(*given: Any, **options: Any) -> Wheel:
    [wheel] = write_wheels(*given, **options)
    return wheel


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


class TestWriting:
    def test_it_holds_proven_kernels(
        self, known: KernelList, cache: ArtifactCache, tmp_path: Path
    ) -> None:
        made = write_wheel(known, cache, tmp_path / "out")
        assert (made.kernels, made.left_out) == (1, 1)
        found = members(made.path)
        (kernel,) = (k for k in known.kernels.values() if k.proof)
        assert {name for name in found if name.endswith(".so")} == {
            f"{PACKAGE}/libraries/{kernel.sha256}.so"
        }
        listed = KernelList.from_json(json.loads(found[f"{PACKAGE}/kernels.json"]))
        assert [k.proof for k in listed.kernels.values()] == [PROOF]

    def test_equal_kernels_make_an_equal_wheel(
        self, known: KernelList, cache: ArtifactCache, library: Path, tmp_path: Path
    ) -> None:
        first = write_wheel(known, cache, tmp_path / "a")
        again = ArtifactCache(tmp_path / "again")
        put(again, library, "prebuilt1", compile_cpu_s=7.0)
        second = write_wheel(known, again, tmp_path / "b")
        assert first.sha256 == second.sha256 == hashlib.sha256(second.path.read_bytes()).hexdigest()

    def test_a_library_of_several_kernels_is_in_it_once(
        self, known: KernelList, cache: ArtifactCache, tmp_path: Path
    ) -> None:
        made = write_wheel(known, cache, tmp_path, with_unproven=True)
        names = [Path(name).name for name in members(made.path)]
        assert names.count("meta.json") == 2
        assert len([name for name in names if name.endswith(".so")]) == 1

    def test_dispatchers_of_the_present_sources_are_in_it(
        self,
        known: KernelList,
        cache: ArtifactCache,
        library: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        versions = {"torch": "2.11.0", "python": "cpython-312-x86_64-linux-gnu"}
        facts = {"template": dispatcher.SOURCE, "host_compiler": "g++ 12.2", **versions}
        keys = [dispatcher._key(versions), "1" * 32]  # the second is of other sources
        for key in keys:
            cache.put(key, library, resources=None, compile_cpu_s=1, source="int x;", facts=facts)
        made = write_wheel(known, cache, tmp_path)
        assert made.dispatchers == ("torch 2.11.0, cpython-312-x86_64-linux-gnu",)
        found = members(made.path)
        assert f"{PACKAGE}/artifacts/{keys[0]}/meta.json" in found
        assert not any(keys[1] in name for name in found)
        (metadata,) = (data for name, data in found.items() if name.endswith("METADATA"))
        assert b"dispatchers for torch 2.11.0, cpython-312-x86_64-linux-gnu" in metadata

    def test_its_package_as_pip_installs_it(
        self, known: KernelList, cache: ArtifactCache, tmp_path: Path
    ) -> None:
        made = write_wheel(known, cache, tmp_path / "out")
        assert write_package(known, cache, tmp_path / "site") == 1
        packed = {name: data for name, data in members(made.path).items() if PACKAGE + "/" in name}
        written = {name: (tmp_path / "site" / name).read_bytes() for name in packed}
        assert written == packed
        assert len([p for p in (tmp_path / "site").rglob("*") if p.is_file()]) == len(packed)

    def test_unproven_ones_on_request(
        self, known: KernelList, cache: ArtifactCache, tmp_path: Path
    ) -> None:
        assert write_wheel(known, cache, tmp_path, with_unproven=True).kernels == 2

    def test_nothing_proven_is_an_error(self, cache: ArtifactCache, tmp_path: Path) -> None:
        known = KernelList("13.0.88", "4.2.0", "9.0").with_kernels([Kernel("a", "prebuilt1", "ab")])
        with pytest.raises(ConfigError, match="none of 1 kernels is proven: tuner prove"):
            write_wheel(known, cache, tmp_path)

    def test_a_kernel_that_is_not_there_or_another(
        self, known: KernelList, cache: ArtifactCache, tmp_path: Path
    ) -> None:
        other = known.with_kernels([Kernel(spec(64).key, "prebuilt1", "cd" * 32, PROOF)])
        with pytest.raises(ConfigError, match="artifact prebuilt1 was rebuilt"):
            write_wheel(other, cache, tmp_path)
        with pytest.raises(ConfigError, match="artifact prebuilt1 is not in"):
            write_wheel(known, ArtifactCache(tmp_path / "empty"), tmp_path)

    def test_a_newer_glibc_is_refused(
        self, known: KernelList, cache: ArtifactCache, library: Path, tmp_path: Path
    ) -> None:
        newer = tmp_path / "newer.so"
        newer.write_bytes(library.read_bytes() + b"\0GLIBC_2.99\0")
        assert newest_glibc(newer.read_bytes()) == (2, 99)
        digest = put(cache, newer, "k3")
        one = known.with_kernels([Kernel(spec(256).key, "k3", digest, PROOF)])
        with pytest.raises(ConfigError, match=r"needs glibc 2.99 \(allowed: 2.34\)"):
            write_wheel(one, cache, tmp_path)

    def test_the_size_is_bounded(
        self,
        known: KernelList,
        cache: ArtifactCache,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tuner.bundle.wheel.MAX_BYTES", 100)
        with pytest.raises(ConfigError, match=r"bytes \(allowed: 100\)"):
            write_wheel(known, cache, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_what_does_not_fit_is_in_a_second_wheel(
        self,
        cache: ArtifactCache,
        library: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tuner.bundle.wheel._SPARE_BYTES", 0)
        kernels = KernelList("13.0.88", "4.2.0", "9.0")
        for tile in (32, 64, 128):
            other = tmp_path / f"{tile}.so"
            other.write_bytes(library.read_bytes() + random.Random(tile).randbytes(30_000))
            digest = put(cache, other, f"prebuilt{tile}")
            kernels = kernels.with_kernels(
                [Kernel(spec(tile).key, f"prebuilt{tile}", digest, PROOF)]
            )
        monkeypatch.setattr("tuner.bundle.wheel.MAX_BYTES", 80_000)
        wheels = write_wheels(kernels, cache, tmp_path / "out")
        assert [wheel.kernels for wheel in wheels] == [2, 1]
        assert all(wheel.bytes <= 80_000 for wheel in wheels)
        names = [wheel.path.name.partition("-")[0] for wheel in wheels]
        assert names == [PACKAGE, f"{PACKAGE}_2"]
        first, second = (members(wheel.path) for wheel in wheels)
        first_name = wheels[0].path.name
        assert not (first.keys() & second.keys())
        for name, data in (first | second).items():
            path = tmp_path / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        monkeypatch.syspath_prepend(tmp_path / "site")
        importlib.invalidate_caches()
        prebuilt.folder.cache_clear()
        monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path / "fresh"))
        lists = prebuilt.kernel_lists()
        assert [path.name for path in lists] == ["kernels.json", "kernels_2.json"]
        assert [finding.found.split()[0] for finding in _prebuilt()] == [
            prebuilt.DISTRIBUTION,
            f"{prebuilt.DISTRIBUTION}-2",
        ]
        specs = {one for path in lists for one in KernelList.read(path).kernels}
        assert specs == kernels.kernels.keys()
        assert all(ArtifactCache().find(f"prebuilt{tile}") for tile in (32, 64, 128))
        prebuilt.folder.cache_clear()
        monkeypatch.setattr("tuner.bundle.wheel.MAX_BYTES", 800_000)
        others = {
            tmp_path / "out" / first_name.replace(PACKAGE, f"{PACKAGE}{other}")
            for other in ("_extra", "_2-0.1", "2")
        }
        for path in others:
            path.write_bytes(b"another program's")
        (whole,) = write_wheels(kernels, cache, tmp_path / "out")
        left = set((tmp_path / "out").iterdir())
        assert left == {whole.path, *others}, "the second one alone is stale"

    def test_the_command_says_it(
        self,
        known: KernelList,
        cache: ArtifactCache,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        known.write(tmp_path / "kernels.json")
        monkeypatch.setattr("tuner.bundle.wheel.ArtifactCache", lambda: cache)
        arguments = ["--kernels", str(tmp_path / "kernels.json"), "--out", str(tmp_path)]
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert ": 1 kernels, " in out and "left out, for they are not proven: 1" in out
        monkeypatch.setattr("tuner.bundle.wheel.users", lambda: [tmp_path / "kernels.json"])
        assert main(["--out", str(tmp_path)]) == 0
        assert ": 1 kernels, " in capsys.readouterr().out
        monkeypatch.setattr("tuner.bundle.wheel.users", list)
        assert main(["--out", str(tmp_path)]) == 1
        assert "there is no kernel list: tuner build --portfolio" in capsys.readouterr().err
        assert main(["--kernels", str(tmp_path / "none.json")]) == 1
        assert capsys.readouterr().err.startswith("build-kernels: kernel list ")


@pytest.fixture(scope="module")
def site_packages(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip installs it."""
    folder = tmp_path_factory.mktemp("wheel")
    cache = ArtifactCache(folder / "artifacts")
    wheel = write_wheel(filled(cache, library), cache, folder / "out").path
    pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    target = ["--no-compile", "--target", str(folder / "site")]
    subprocess.run([*pip, *target, str(wheel)], check=True)
    return folder / "site"


@pytest.fixture
def installed(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The package's folder, of a copy for this test."""
    site = shutil.copytree(site_packages, tmp_path / "site")
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    prebuilt.folder.cache_clear()
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path / "fresh"))
    yield site / PACKAGE
    prebuilt.folder.cache_clear()


class TestInstalled:
    def test_a_kernel_is_found_and_loaded(self, installed: Path) -> None:
        artifact = ArtifactCache().find("prebuilt1")
        assert artifact.library == installed / "libraries" / f"{artifact.sha256}.so"
        assert load(artifact).workspace_bytes([7]) == 7

    def test_proofs_come_along(self, installed: Path) -> None:
        [path] = prebuilt.kernel_lists()
        found = KernelList.read(path).find(spec(64))
        assert found is not None and found.proof == PROOF

    def test_one_s_own_build_comes_first(self, installed: Path, library: Path) -> None:
        own = ArtifactCache()
        put(own, library, "prebuilt1")
        found = own.find("prebuilt1")
        assert found is not None and found.library.is_relative_to(own.root)

    def test_a_cache_that_was_named_has_its_own_kernels_alone(
        self, installed: Path, tmp_path: Path
    ) -> None:
        assert ArtifactCache(tmp_path / "named").find("prebuilt1") is None

    @pytest.mark.parametrize("file", ["libraries/*.so", "artifacts/prebuilt1/meta.json"])
    def test_a_damaged_kernel_is_refused_and_left_there(
        self, installed: Path, file: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        (path,) = installed.glob(file)
        path.write_bytes(path.read_bytes()[:-3])
        assert ArtifactCache().find("prebuilt1") is None
        assert path.exists()
        assert "install cutlass-tuner-kernels again" in caplog.text

    def test_a_kernel_that_others_can_write_is_refused(self, installed: Path) -> None:
        for path in (installed / "libraries").iterdir():
            path.chmod(0o666)
        assert ArtifactCache().find("prebuilt1") is None


class TestDoctor:
    def test_the_wheel_is_named(self, installed: Path) -> None:
        (found,) = _prebuilt()
        assert found.state == "ok"
        assert "1 kernels, 1 proven, of nvcc 13.0.88, for compute capability 9.0" in found.found

    def test_another_version_is_a_note(
        self, installed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tuner, "__version__", "9.9")
        (found,) = _prebuilt()
        assert found.state == "note" and "this is cutlass-tuner 9.9" in found.found

    def test_kernels_of_other_templates_are_a_note(
        self, installed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(resources, "template_digest", lambda template: "another")
        (found,) = _prebuilt()
        assert found.state == "note"
        assert "1 proven" in found.found and "1 are of other templates" in found.found

    def test_a_list_that_others_can_write_is_a_note(self, installed: Path) -> None:
        (installed / "kernels.json").chmod(0o666)
        (found,) = _prebuilt()
        assert found.state == "note" and "can be written by others" in found.found
        assert f"install {prebuilt.DISTRIBUTION} again as this user or as root" in found.found
        assert "TUNER_CACHE_DIR" not in found.found, "it does not lie there"

    def test_a_damaged_list_is_a_note(self, installed: Path) -> None:
        (installed / "kernels.json").write_text("{")
        (found,) = _prebuilt()
        assert found.state == "note" and "kernel list" in found.found


def test_without_the_wheel_there_is_none() -> None:
    prebuilt.folder.cache_clear()
    assert prebuilt.folder() is None and prebuilt.artifacts() is None
    assert list(_prebuilt()) == []
