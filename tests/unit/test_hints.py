"""Hints of other tuners' files: what is decoded, what is refused, and where a search begins."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toys
from damage import KINDS
from mutated import HOSTILE, mutated

from tuner.cli import main
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.base import group_by_kernels
from tuner.hardware import DEFAULT_GPU
from tuner.problem import E4M3, GemmProblem, GroupedGemmProblem, Problem
from tuner.search import hints
from tuner.search.hints import KERNEL, first, is_hints, read
from tuner.store import open_store

HEAD = "Problem,Provider,Operation,Status,m,n,k,A,raster_order,swizzle_size,Runtime\n"
PINGPONG = (
    "cutlass3x_sm90_tensorop_s64x128x16gemm_f16_f16_f32_f16_f16_64x128x64_2x1x1_0_tnt_align8"
    "_warpspecialized_pingpong_epi_tma"
)
STREAM_K = (
    "cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_void_bf16_128x256x64_1x2x1_0_tnn_align8"
    "_stream_k_warpspecialized_cooperative_epi_nosmem"
)
PRODUCT = GemmProblem(512, 4096, 4096, dtype="float16")
BLOCKS = GemmProblem(512, 4096, 4096, dtype=E4M3, scales="block")


class Member:
    """A family's groups, as its search has them."""

    def __init__(self, name: str, problem: Problem) -> None:
        self.family = family(name)
        space = self.family.space(problem, DEFAULT_GPU)
        self.groups = dict(enumerate(group_by_kernels(self.family, space)))


#: Few configs of a family.
SMALL: Any = SimpleNamespace(
    family=family("gemm"), groups={0: list(islice(family("gemm").space(PRODUCT, DEFAULT_GPU), 5))}
)


def profile(folder: Path, *rows: str, head: str = HEAD) -> Path:
    path = folder / "gemm.csv"
    path.write_text(head + "".join(f"{row}\n" for row in rows))
    return path


def row(operation: str, runtime: float | str = 0.1, size: str = "512,4096,4096") -> str:
    return f"1,CUTLASS,{operation},success,{size},f16:row,along_n,2,{runtime}"


def tried(problem: Problem, name: str, *known: hints.Hint) -> list[Config]:
    member: Any = Member(name, problem)
    return first(problem, DEFAULT_GPU, [member], known)


def test_a_profiled_kernel_is_decoded_to_the_config_that_it_is(tmp_path: Path) -> None:
    (hint,) = read(profile(tmp_path, row(PINGPONG)))
    assert hint.sizes == {
        **{"m": 512, "n": 4096, "k": 4096, "batch": 1, "dtype": "float16"},
        **{"layout_a": "row", "layout_b": "col"},
    }
    (config,) = tried(PRODUCT, "gemm", hint)
    own = {name: config[name] for name in hint.params}
    assert own == hint.params == {
        **{"tile_m": 64, "tile_n": 128, "tile_k": 64, "cluster_m": 2, "cluster_n": 1},
        **{"swap_ab": False, "kernel_schedule": "TmaWarpSpecializedPingpong"},
        **{"epilogue_schedule": "TmaWarpSpecialized"},
        **{"raster_order": "AlongN", "max_swizzle_size": 2},
    }  # fmt: skip
    assert tried(GemmProblem(512, 4096, 2048), "gemm", hint) == [], "another problem"


def test_a_column_major_result_is_the_transposed_product(tmp_path: Path) -> None:
    (hint,) = read(profile(tmp_path, row(STREAM_K, size="4096,512,1024")))
    assert (hint.sizes["m"], hint.sizes["n"]) == (512, 4096)
    assert (hint.sizes["layout_a"], hint.sizes["layout_b"]) == ("row", "col")
    assert hint.params["swap_ab"] is True and hint.params["tile_scheduler"] == "StreamK"
    assert hint.params["epilogue_schedule"] == "NoSmemWarpSpecialized"


def test_the_fastest_kernels_of_a_problem_are_kept_in_their_order(tmp_path: Path) -> None:
    names = [PINGPONG.replace("64x128x64_", f"64x{n}x64_") for n in (16, 32, 64, 96, 128)]
    path = profile(tmp_path, *(row(name, 9 - i) for i, name in enumerate(names)))
    kept = read(path)
    assert [hint.params["tile_n"] for hint in kept] == [128, 96, 64, 32]
    configs = tried(PRODUCT, "gemm", *reversed(kept))
    assert configs[0]["tile_n"] == 128 and len(configs) == len(set(configs)) > 1


@pytest.mark.parametrize("fast", [True, False])
def test_an_e4m3_kernel_is_of_products_that_accumulate_as_it_does(
    tmp_path: Path, fast: bool
) -> None:
    kernel = PINGPONG.replace("x16gemm_f16_f16", "x32gemm_e4m3_e4m3").replace("x64_2", "x128_2")
    hint = read(
        profile(tmp_path, row(kernel.replace("_epi", "_fp8_fastaccum_epi" * fast or "_epi")))
    )
    problems = {is_fast: GemmProblem(512, 4096, 4096, dtype=E4M3, fast_accum=is_fast)
                for is_fast in (True, False)}  # fmt: skip
    assert tried(problems[fast], "gemm", *hint) and not tried(problems[not fast], "gemm", *hint)


def test_rows_of_other_kernels_are_left_out(tmp_path: Path) -> None:
    others = (
        "cutlass_tensorop_f16_s1688gemm_f16_256x128_32x2_nn_align8",
        STREAM_K.replace("gemm_bf16_bf16", "gemm_e4m3_bf16"),
        PINGPONG.replace("f16_f16_f32", "s8_s8_s32"),
        "cublas",
    )
    path = profile(tmp_path, *map(row, others), row(PINGPONG))
    assert len(read(path)) == 1
    failed = row(PINGPONG).replace("success", "failed")
    with pytest.raises(ConfigError, match="has no hint"):
        read(profile(tmp_path, failed, *map(row, others)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("m,n\n1,2\n", "lacks the columns Operation, Status, k, Runtime"),
        (HEAD + row(PINGPONG, "fast") + "\n", "line 2: could not convert .*wanted: numbers"),
        (HEAD, "has no hint"),
        ("", "lacks the columns"),
    ],
)
def test_a_wrong_profile_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        read(profile(tmp_path, head=text))
    assert "\n" not in str(refused.value)


def table(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def tile(m: int, n: int) -> dict[str, int]:
    return {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": 64, "num_warps": 4}


def test_a_table_of_experts_is_of_both_products_and_the_nearest_rows(tmp_path: Path) -> None:
    name = "E=32,N=2880,device_name=NVIDIA_H200.json"
    content = {"triton_version": "3.6.0", "16": tile(16, 64), "1024": tile(128, 128)}
    known = read(table(tmp_path, name, content))
    assert len(known) == 2
    for n, k in ((5760, 2880), (2880, 2880)):
        problem = GroupedGemmProblem(32, 1000, n, k, "zipf", "bfloat16")
        config, *_ = tried(problem, "grouped_gemm", *known)
        assert {config["tile_m"], config["tile_n"]} == {128}
    few = GroupedGemmProblem(32, 20, 5760, 2880, "zipf", "bfloat16")
    (config,) = tried(few, "grouped_gemm", *known)
    assert (config["swap_ab"], config["tile_m"], config["tile_n"]) == (True, 64, 16)
    other = GroupedGemmProblem(64, 20, 5760, 2880, "zipf", "bfloat16")
    assert tried(other, "grouped_gemm", *known) == []


def test_a_table_of_block_scaled_products(tmp_path: Path) -> None:
    name = "N=4096,K=512,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    known = read(table(tmp_path, name, {"64": tile(64, 128)}))
    (config,) = tried(GemmProblem(64, 4096, 512, dtype=E4M3, scales="block"),
                      "block_scaled_gemm", *known)  # fmt: skip
    tiles = (config["tile_m"], config["tile_n"])
    assert (tiles[::-1] if config["swap_ab"] else tiles) == (64, 128)
    assert tried(GemmProblem(64, 4096, 512), "gemm", *known) == []


def test_a_table_of_experts_counts_tokens_each_of_several_rows(tmp_path: Path) -> None:
    content = {"128": tile(16, 128), "1024": tile(128, 256)}
    known = read(table(tmp_path, "E=128,N=384,device_name=NVIDIA_H200.json", content))
    problem = GroupedGemmProblem(128, 1024, 768, 2048, "zipf", "bfloat16")
    tiles = [{c["tile_m"], c["tile_n"]} for c in tried(problem, "grouped_gemm", *known)]
    assert {128, 256} in tiles and any(16 in each for each in tiles)


def test_a_table_of_other_types_has_no_hint_for_these(tmp_path: Path) -> None:
    name = "E=1,N=3072,device_name=NVIDIA_H200,dtype=int8_w8a16.json"
    with pytest.raises(ConfigError, match="is of int8_w8a16"):
        read(table(tmp_path, name, {"64": tile(64, 128)}))


@pytest.mark.parametrize("content", ["[]", "{", {"a": tile(1, 1)}, {"16": {"BLOCK_SIZE_M": 16}}])
def test_a_wrong_table_is_one_line(tmp_path: Path, content: Any) -> None:
    path = table(tmp_path, "N=4096,K=512,device_name=NVIDIA_H200.json", content)
    with pytest.raises(ConfigError, match="is not a table of vLLM") as refused:
        read(path)
    assert "\n" not in str(refused.value)


OF_ALL = {"op": "gemm", "sizes": {"m": 512}, "rows": 512, "params": {}, "rank": 0, "source": "a"}


def test_of_a_mutated_file_come_hints_that_a_search_can_use_or_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_mode: bool
) -> None:
    """Files of others, which hints are read from, and the own one, which holds them."""
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    draw, used, refused = random.Random(0), 0, 0
    name = "N=4096,K=4096,device_name=NVIDIA_H200.json"
    profiled = (HEAD + row(PINGPONG) + "\n").encode()
    own = {"format": "cutlass-tuner hints 1", "hints": [{**OF_ALL, "params": {"tile_m": 64}}]}
    for _ in range(20_000 if long_mode else 400):
        content = bytearray(profiled)
        if draw.random() < 0.5:
            cells = profiled.decode().splitlines()[1].split(",")
            cells[draw.randrange(len(cells))] = str(draw.choice(HOSTILE))
            cells = cells[: draw.randrange(3, len(cells) + 2)]
            content = bytearray(HEAD.encode() + ",".join(cells).encode(errors="replace"))
        else:
            draw.choice(KINDS)(content, draw)
        files = {
            "a.csv": bytes(content),
            name: mutated({"16": tile(16, 64), "512": tile(128, 128)}, draw),
            hints.file().name: mutated(own, draw),
        }
        for which, data in files.items():
            (tmp_path / which).write_bytes(data)
            try:
                known = hints.stored() if which == hints.file().name else read(tmp_path / which)
            except ConfigError as exc:
                refused += 1
                assert "\n" not in str(exc)
                continue
            used += 1
            first(replace(PRODUCT, scales=""), DEFAULT_GPU, [SMALL], known)
            first(BLOCKS, DEFAULT_GPU, [SMALL], known)
            hints.file().unlink(missing_ok=True)
            hints.add(known)
            assert hints.stored() == known
    assert used > 50 and refused > 50


def test_files_are_told_by_their_names(tmp_path: Path) -> None:
    assert is_hints(tmp_path / "a.csv") and not is_hints(tmp_path / "export.json")
    assert is_hints(tmp_path / "E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "a.csv")


def test_hints_are_stored_once_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    assert hints.stored() == []
    known = read(profile(tmp_path, row(PINGPONG)))
    hints.add(known)
    hints.add(known)
    assert hints.stored() == known
    for damaged in ("{", '{"format": "other", "hints": []}', '{"hints": [1]}'):
        hints.file().write_text(damaged)
        with pytest.raises(ConfigError, match="cannot be read"):
            hints.stored()


def test_names_of_the_installed_library_are_decoded() -> None:
    """Kernels of CUTLASS's own generator, where its package is installed."""
    library = pytest.importorskip("cutlass_library", reason="cutlass_library is not installed")
    from cutlass_library import gemm_operation

    f16, row_major, column = (
        library.DataType.f16,
        library.LayoutType.RowMajor,
        library.LayoutType.ColumnMajor,
    )
    instruction = library.MathInstruction(
        [64, 128, 16], f16, f16, library.DataType.f32,
        library.OpcodeClass.TensorOp, library.MathOperation.multiply_add,
    )  # fmt: skip
    operation = gemm_operation.GemmOperation(
        library.GemmKind.Universal3x, 90,
        library.TileDescription([128, 128, 64], 0, [4, 1, 1], instruction, 90, 90, [2, 1, 1]),
        library.TensorDescription(f16, row_major, 8), library.TensorDescription(f16, column, 8),
        library.TensorDescription(f16, row_major, 8), library.DataType.f32,
        kernel_schedule=library.KernelScheduleType.TmaWarpSpecializedCooperative,
        epilogue_schedule=library.EpilogueScheduleType.TmaWarpSpecializedCooperative,
        tile_scheduler=library.TileSchedulerType.StreamK,
    )  # fmt: skip
    decoded = KERNEL.fullmatch(operation.procedural_name())
    parts = (decoded["tile"], decoded["cluster"], decoded["layout"], decoded["schedule"])
    assert parts == ("128x128x64", "2x1x1", "tnt", "_warpspecialized_cooperative")
    assert decoded["stream"] and decoded["epilogue"] == "tma"


@pytest.mark.parametrize("is_hinted", [False, True])
def test_a_sweep_begins_with_a_hint_and_measures_the_others_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_hinted: bool
) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    slow = {"m": 64, "n": 64, "k": 64}
    if is_hinted:
        hints.add([hints.Hint("gemm", {"n": toys.GEMM.n}, toys.GEMM.m, slow, 0, "a.csv")])
    runner = toys.CountingRunner(toys.recording())
    with open_store(f"sqlite:///{tmp_path}/store.sqlite") as store:
        outcome = toys.sweep(runner, store, trials=27).run()
    order = [config for config in runner.configs if config.family == "toy"]
    assert (slow.items() <= order[0].params.items()) is is_hinted
    assert outcome.ranking[0].config == toys.BEST
    assert any("hints are tried first" in note for note in outcome.notes) is is_hinted


def test_an_import_of_another_tuner_s_file_stores_hints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path / "cache"))
    path = profile(tmp_path, row(PINGPONG))
    assert main(["store", "import", str(path)]) == 0
    assert capsys.readouterr().out == "1 hint added: sweeps try and measure them first\n"
    assert main(["store", "import", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"hints": 1} and len(hints.stored()) == 1
    assert main(["store", "import", str(profile(tmp_path))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no hint" in line
