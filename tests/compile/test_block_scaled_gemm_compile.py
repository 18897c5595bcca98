"""The template of block-scaled products through nvcc, and on emulated threads of a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from block_scaled_cases import CASES, GROUPED, PROMOTED, config, grouped
from block_scaled_cases import problem as problem_of
from emulation import device_half
from emulation import emulated as run_emulated

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families.block_scaled_gemm import BlockScaledGemm, spec_of

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

FAMILY = BlockScaledGemm()
ANY = problem_of(1000, 2112, 1152)


ALL = {
    **{name: spec_of(chosen, is_grouped=False) for name, chosen in CASES.items()},
    **{f"{name}, groups": spec_of(grouped(CASES[name]), is_grouped=True) for name in GROUPED},
    **{
        f"{name}, promoted": spec_of(chosen, is_grouped=False, is_promoted=True)
        for name, chosen in PROMOTED.items()
    },
}
#: One with its host code, of the others the device code: of one of each kind and of a tenth of
#: the rest, but under ``--long``.
SPECS = [ALL["square"]]
OTHERS = [spec for spec in ALL.values() if spec not in SPECS]
KINDS = [ALL[name] for name in ("square, groups", "promoted, split, promoted")]
DEVICE_SPECS = [*dict.fromkeys([*KINDS, *OTHERS[::10]])]


def test_no_kernel_spills_or_serialises_its_products(
    compiler: Compiler, device_compiler: Compiler, long_mode: bool
) -> None:
    assert len(ALL) == len(CASES) + len(GROUPED) + len(PROMOTED)
    others = OTHERS if long_mode else DEVICE_SPECS
    futures = dict([*compiler.submit(SPECS), *device_compiler.submit(others)])
    assert len(futures) == len(SPECS) + len(others)
    for case, spec in ((case, spec) for case, spec in ALL.items() if spec in futures):
        artifact = futures[spec].result()
        used = artifact.resources
        assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0), case
        assert not artifact.facts.get("advice"), case


def test_the_library_refuses_what_it_would_get_wrong(compiler: Compiler) -> None:
    [(_, future)] = compiler.submit(SPECS[:1])
    kernel = load(future.result())
    (launch,) = FAMILY.launches(ANY, CASES["square"], 1.0)
    assert kernel.workspace_bytes(launch.integers) == 0
    for position, value in (
        (0, 0),
        (1, 2113),
        (1, 2**30 + 8),
        (2, 1160),
        (3, 1136),
        (3, 1153),
        (4, 1153),
        (5, 2108),
        (5, 2104),
        (7, -1),
        (9, 2**36),
        (10, 0),
        (11, 0),
        (11, 3),
        (13, 0),
        (13, 2),
        (14, -1),
    ):
        wrong = [*launch.integers]
        wrong[position] = value
        with pytest.raises(BenchmarkError):
            kernel.workspace_bytes(wrong)
        with pytest.raises(BenchmarkError):
            kernel.launch((256, 512, 768, 1024, 1280), wrong, launch.scalars, 0, 0)
    for tensors in (
        (264, 512, 768, 1024, 1280),
        (256, 512, 768, 0, 1280),
        (256, 512, 768, 1026, 4),
    ):
        with pytest.raises(BenchmarkError):
            kernel.launch(tensors, launch.integers, launch.scalars, 0, 0)


#: The product of a warp group is the emulator's.
_MULTIPLY = re.compile(r"(__device__ __forceinline__ void multiply\(.*?\) \{\n).*?\n\}\n", re.S)
_PRODUCT = r"\1  emulator::self().products.push_back({d, x, y, adds, kTileY});\n}\n"
_EARLIER = re.compile(r"(void earlier_products_wait\(\) \{ ).*? \}\n")
#: What else the template has in PTX.
_BODIES = {
    "scheduler_barrier_arrive": "emulator::come(kTurns + 1 - group, kGroups * kWarpGroup);",
    "store_shared_words": "for (int i = 0; i < 4; ++i) store_shared(to + 4 * i, words[i]);",
}
#: M, N, K; tiles of a band, walked along the rows, clusters at once.
EMULATED = ((130, 72, 1040, 1, True, 1), (300, 392, 1024, 4, False, 2))
#: The same of groups, and how many.
EMULATED_GROUPS = ((130, 72, 272, 1, True, 1, 5), (200, 136, 128, 1, False, 3, 70))
MUTANTS = {
    "a stage is free before it was read": (
        "wait_for(ring.empty(stage.index), stage.phase ^ 1);  // the first time round it is",
        "",
    ),
    "a warp does not leave": ("if (lane == 0) arrive(empty);", ""),
    "a block does not tell its neighbour": ("if (lane < kMulticast)", "if (lane == 0)"),
    "a block ends before its neighbour": (
        "  if constexpr (kCluster > 1) cluster_sync();\n}",
        "}",
    ),
    "sums are overwritten while they are read": ("named_barrier(kConsumersMeet, kConsumers);", ""),
    "a neighbour's rows": ("share_y * kBlock;", "0 * share_y;"),
    "the tile's first block of columns for all": (
        "(tile.column + lane * kRun) / kBlock",
        "tile.column / kBlock",
    ),
    "the next row's factor": (
        "factors + lane.first(part) * 4)",
        "factors + lane.first(part) * 4 + 4)",
    ),
    "a stage is left while it is read": ("else earlier_products_wait();", ""),
    "a box begins at any row": ("tile.row / 4 * 4 + i", "tile.row + i"),
    "factors of the rows before": ("factors(box + tile.row % 4 * 4)", "factors(box)"),
    "a box of a group's end": ("if (!kGrouped || tile.row + last <= tile.end)", "if (true)"),
    "all bytes of a clipped tile": ("ends_y ? p.end_bytes_y : kBytesY", "kBytesY"),
    "rows of the first tile": ("ends_x ? p.last_x : p.x", "p.last_x"),
    "nobody begins": ("if (lane.group == 1) scheduler_barrier_arrive(1);", ""),
    "words of another thread": ("i) / 4 * kConsumers * 16", "i) / 4 * kConsumers"),
    "the parts before are left out": ("add_held(ring, lane, false, sums);", ""),
    "sums are held in boxes that are copied": (
        "if (threadIdx.x % kWarp == 0) copies_read();\n    __syncwarp();\n  }\n  add_held",
        "}\n  add_held",
    ),
}


_BY_TMA = config((64, 64), 2, store_buffers=1, unroll=2, tma_factors=True)
_SERIAL = Config(FAMILY.name, {**_BY_TMA.params, "serial_parts": 2})


def emulated(
    chosen: Config,
    nvcc: Path,
    folder: Path,
    mutant: tuple[str, str] = ("", ""),
    is_grouped: bool = False,
    is_promoted: bool = False,
    orders: int = 1,
) -> str:
    """Output of an emulated kernel about its products; empty where all are right."""
    spec = spec_of(chosen, is_grouped=is_grouped, is_promoted=is_promoted)
    device, products = _MULTIPLY.subn(_PRODUCT, device_half(render(spec, "emulated")))
    assert products == 1
    device = _EARLIER.sub(r"\1emulator::run_products(1); }\n", device)
    for name, body in _BODIES.items():
        device = re.sub(
            rf"(void {name}\([^)]*\) \{{).*?\n\}}\n", rf"\1 {body} }}\n", device, flags=re.S
        )
    # With groups a box of factors begins before their first row.
    box = "kFactorBox" if "kFactorBox" in device else "kRowFactors"
    device += f"constexpr int kBoxFloats = k_emulated::{box};\n"
    cases = EMULATED_GROUPS if is_grouped else [(*case, 1) for case in EMULATED]
    return run_emulated(device, "block_scaled.h", cases, nvcc, folder, mutant, orders)


#: Emulated in every run; the others with ``scripts/test --long``.
USUAL = {"two stages", "a warp does not leave"}


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("case", CASES)
def test_an_emulated_kernel_is_right(compiler: Compiler, case: str, tmp_path: Path) -> None:
    # As few stages as there are at most two of three blocks under way, that they are used again.
    few = {**CASES[case].params, "stages": min(3, CASES[case]["stages"])}
    if CASES[case]["split_k"] > 1 and CASES[case]["tile_m"] > 128:
        few["stages"] = CASES[case]["stages"]
    assert emulated(Config(FAMILY.name, few), compiler.toolchain.nvcc, tmp_path) == ""


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("case", GROUPED)
def test_an_emulated_kernel_follows_the_groups(
    compiler: Compiler, case: str, tmp_path: Path
) -> None:
    few = Config(FAMILY.name, {**grouped(CASES[case]).params, "stages": 2})
    assert emulated(few, compiler.toolchain.nvcc, tmp_path, is_grouped=True) == ""


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("case", PROMOTED)
def test_an_emulated_kernel_promotes(compiler: Compiler, case: str, tmp_path: Path) -> None:
    few = Config(FAMILY.name, {**PROMOTED[case].params, "stages": 2})
    if few["split_k"] > 1:
        few = PROMOTED[case]
    assert emulated(few, compiler.toolchain.nvcc, tmp_path, is_promoted=True) == ""


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("name", MUTANTS)
def test_the_emulator_finds_what_is_wrong(compiler: Compiler, name: str, tmp_path: Path) -> None:
    chosen = {
        "a block does not tell its neighbour": config((128, 128), 2, cluster=(2, 1)),
        "a block ends before its neighbour": config((64, 64), 2, split_k=8),
        "sums are overwritten while they are read": config((128, 64), 2, split_k=2),
        "a neighbour's rows": config((128, 128), 2, cluster=(2, 1)),
        "the tile's first block of columns for all": config((128, 192), 2),
        "a stage is left while it is read": config(
            (64, 32), 2, unroll=2, tma_factors=True, ahead=True
        ),
        "all bytes of a clipped tile": config(
            (64, 32), 2, unroll=2, tma_factors=True, clips_rows=True
        ),
        "rows of the first tile": config((64, 32), 2, unroll=2, tma_factors=True, clips_rows=True),
        "nobody begins": config((128, 32), 2, unroll=2, turns=True),
        "words of another thread": config((128, 64), 2, split_k=2, vector_merge=True),
        "the parts before are left out": _SERIAL,
        "sums are held in boxes that are copied": _SERIAL,
        "a box begins at any row": grouped(_BY_TMA),
        "factors of the rows before": grouped(_BY_TMA),
        "a box of a group's end": grouped(config((64, 64), 2, store_buffers=1)),
    }
    one = chosen.get(name, CASES["two stages"])
    is_grouped = "split_k" not in one.params
    nvcc = compiler.toolchain.nvcc
    assert emulated(one, nvcc, tmp_path, MUTANTS[name], is_grouped=is_grouped, orders=4)
