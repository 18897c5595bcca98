"""CuTe DSL beside the C++ kernels: costs, the places it is looked for, and the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cute_dsl
from tuner.errors import ConfigError


def test_a_missing_example_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dense_gemm_persistent"):
        cute_dsl.main(["--example", str(tmp_path / "none.py")])


def test_another_file_is_not_the_example(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("x = 1")
    with pytest.raises(ConfigError, match="is not dense_gemm_persistent"):
        cute_dsl.loaded(tmp_path / "other.py")


def test_it_is_found_among_the_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cute_dsl.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TUNER_PEERS_PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="not installed"):
        cute_dsl.package()
    place = tmp_path / "fa4" / "nvidia_cutlass_dsl" / "dsl_packages"
    (place / "cutlass").mkdir(parents=True)
    (place / "cutlass" / "__init__.py").write_text("x" * 100)
    (tmp_path / "fa4" / "nvidia_cutlass_dsl-4.8.1.dist-info").mkdir()
    (tmp_path / "fa4" / "nvidia_cutlass_dsl-4.8.1.dist-info" / "LICENSE").write_text("y" * 11)
    assert cute_dsl.package() == place
    assert cute_dsl.installed_bytes(place) == 111


def test_every_way_has_its_launch() -> None:
    text = cute_dsl.launches()
    for number in range(len(cute_dsl.WAYS)):
        name = cute_dsl._symbol(cute_dsl.WAYS[number])
        assert f'#include "{name}.h"' in text and f"WAY({name})" in text
        assert f"case {number}: return run_{name}(" in text


def test_a_folder_without_exported_kernels_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--example"):
        cute_dsl.main(["--exported", str(tmp_path), "--export", str(tmp_path)])


def test_a_cost_counts_the_processor() -> None:
    with cute_dsl.cost() as found:
        sum(i * i for i in range(2_000_000))
    assert 0.02 < found.cpu_s <= found.wall_s + 0.5


def test_the_tables_have_every_way() -> None:
    found = {
        "gpu": "GPU",
        "version": "4.8",
        "installed_bytes": 1 << 22,
        "compiling": {"cute_dsl 128x256 cluster 2x1": {"wall_s": 1.5, "cpu_s": 2.25}},
        "products": [
            {"shape": [4096, 4096, 4096], "us": {"cublas": 200.0, "cute_dsl": 210.5}},
            {"shape": [8192, 8192, 8192], "us": {"cublas": 1600.0}},
        ],
    }
    text = cute_dsl.text(found)
    assert "4 MiB" in text and "2.25" in text and "210.5" in text and "nan" in text
