"""The template of latent attention's decoding through nvcc, and on emulated threads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from emulation import device_half
from emulation import emulated as run_emulated

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families.base import KernelSpec
from tuner.families.mla_decode import ARGUMENTS, KERNEL, LATENT, MlaDecode
from tuner.problem import AttentionProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]


def spec_of(dtype: str, whole_rows: bool, cluster: int, form: str = "") -> KernelSpec:
    text = f"SQ=1,SKV=512,H=128,{LATENT},page_size=64,dtype={dtype}"
    problem = AttentionProblem.parse(f"{text},cache={form}" if form else text)
    config = Config(MlaDecode.name, {"whole_rows": whole_rows, "cluster": cluster})
    return MlaDecode().kernels(problem, config)[KERNEL]


CHUNKS, WHOLE, PAIR, WHOLE_PAIR = (
    spec_of("bf16", whole_rows, cluster) for cluster in (1, 2) for whole_rows in (False, True)
)
QUANTISED = [spec_of("bf16", False, 1, form) for form in ("e4m3", "e4m3_blocks")]
SPECS = [CHUNKS]
MAX_SPILLED = 100
"""Bytes."""
DEVICE_SPECS = [WHOLE, PAIR, WHOLE_PAIR, spec_of("fp16", True, 1), *QUANTISED]

#: What the template has in PTX is the emulator's.
_BODIES = {
    "multiply_scores": "emulator::self().products.push_back({d, x, y, adds, kKeys});",
    "multiply_values": "emulator::self().products.push_back({d, x, y, adds, 2 * kResults, true});",
    "multiply_own_values": (
        "emulator::self().products.push_back("
        "{d, 0, y, adds, 2 * kResults, true, 0, rows_of_quad(x)});"
    ),
    "earlier_products_wait": "emulator::run_products(1);",
    "copy_rows": (
        "const int chunks = !kWholeRows ? 1 : column == 0 ? kHalf : kChunks - kHalf;"
        "for (int rank = 0; rank < kCluster; ++rank)"
        " for (int i = 0; i < (kWholeRows ? octets : 1) * chunks; ++i)"
        "  emulator::copy_tensor(map, to + i * kOctetBytes,"
        "   kWholeRows ? (column + i % chunks) * kColumns : column,"
        "   kWholeRows ? (slot + i / chunks) * 8 : slot, page, 0, barrier, rank);"
    ),
    "copy_queries": (
        "emulator::copy_tensor(map, to, column, head, query, sequence, barrier, block_rank());"
    ),
    "has_ended": (
        "auto at = emulator::place_of(barrier);"
        "return at.block->barriers.at(at.address).phase != parity;"
    ),
    "store_words": "std::memcpy(emulator::bytes_at(emulator::place_of(to), 16), word, 16);",
    "copy_words": "std::memcpy(emulator::bytes_at(emulator::place_of(to), 16), from, 16);",
    "widen": "for (int i = 0; i < 4; ++i) x[i] = emulator::e4m3(four >> 8 * i);",
    "store_zeros": "for (int i = 0; i < 4; ++i) store_shared(to + 4 * i, 0.0f);",
}
#: Heads, queries, slots of a page, shares of the tiles, tiles that a sequence's ends and a division
#: cost, lengths.
CASES = {
    "one head": (1, 1, 64, 1, 1, 0, 70),
    "pages of 16, a sequence of three parts": (5, 3, 16, 4, 2, 0, 129, 450, 1),
    "an empty sequence": (16, 4, 64, 3, 1, 0, 200, 0, 3, 64),
    "two blocks of heads, pages of 48": (128, 1, 48, 2, 0, 0, 100, 333),
    "shares without a tile": (64, 1, 128, 7, 3, 0, 65, 1),
    "a sequence of twelve parts": (20, 2, 64, 12, 0, 0, 770, 3),
    "nothing is divided": (20, 2, 64, 2, 1, 4, 100, 330, 64),
}
#: In every run; the others with ``scripts/test --long``.
USUAL = {"pages of 16, a sequence of three parts", "two blocks of heads, pages of 48"}
USUAL |= {"a stage is free before it was read", "factors are those of the tile before"}
#: Faults of the template.
MUTANTS = {
    "what lies behind a sequence is added": ("clear_behind(item, tile, kGroup);", ""),
    "a stage is free before it was read": ("wait_for(memory.empty(stage, kGroup), parity);", ""),
    "probabilities are read before they are there": (
        "wait_for(memory.ready(stage), counter / kStages % 2);",
        "",
    ),
    "the other group's maximum is not taken": ("rescale(kept, true);", ""),
    "the other group's sums are left out": ("sum[r] += load_shared(", "load_shared("),
    "queries are replaced while they are read": (
        "wait_for(memory.query_empty(), items % 2 ^ 1);",
        "",
    ),
    "later queries see no more": (" + 1 + query(r)) - base", " + 1) - base"),
}
#: The same of rows that threads copy.
QUANTISED_MUTANTS = {
    "a stage is written before the first group has read it": (
        "if (i == 0) wait_for(memory.empty(stage, 0), parity);",
        "",
    ),
    "a stage is written before the second group has read it": (
        "wait_for(memory.empty(stage, 1), parity);",
        "",
    ),
    "factors are those of the tile before": (
        "if ((i + 1) % (kPart * kOctets) == 0) factor",
        "if (false) factor",
    ),
    "what lies behind a sequence is read": ("key < of.length ? key", "true ? key"),
    "rotary columns lie where those of one factor do": (
        "kLatent + kBlocks * 4 + half",
        "kLatent + half",
    ),
}


def emulated(
    spec: KernelSpec,
    case: tuple[int, ...],
    nvcc: Path,
    folder: Path,
    mutant: tuple[str, str] = ("", ""),
    orders: int = 1,
) -> str:
    """Output of an emulated kernel about its results; empty where all are right."""
    device = device_half(render(spec, "emulated"))
    for name, body in _BODIES.items():
        if f" {name}(" not in device:
            continue
        head = rf"((?:void|bool) {name}\([^\n]*(?:\n[^\n]*)?\))"
        pattern = re.compile(rf"{head} \{{\s*(?:uint32_t|asm).*?\}}\n(?=\n|//)", re.S)
        device, found = pattern.subn(rf"\1 {{ {body} }}\n", device)
        assert found == 1, name
    padded = (*case, *[-1] * (12 - len(case)))
    kind = ("", "e4m3", "e4m3_blocks").index(str(spec.variables.get("cache", "")))
    head = f"#define EMULATES_BF16\n#define EMULATED_CACHE {kind}\n"
    device = f"{head}static int octets;  // of a box of whole rows\n{device}"
    return run_emulated(device, "mla_decode.h", [padded], nvcc, folder, mutant, orders)


def test_no_kernel_spills_or_serialises_its_products(
    compiler: Compiler, device_compiler: Compiler
) -> None:
    futures = [*compiler.submit(SPECS), *device_compiler.submit(DEVICE_SPECS)]
    for spec, future in futures:
        artifact = future.result()
        used = artifact.resources
        assert used is not None
        # Threads that copy hold a tile: what they want once a sequence lies in local memory.
        most = MAX_SPILLED if "cache" in spec.variables else 0
        assert max(used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) <= most, spec
        assert not artifact.facts.get("advice"), spec


def test_the_library_refuses_what_it_would_get_wrong(compiler: Compiler) -> None:
    [(_, future)] = compiler.submit([CHUNKS])
    kernel = load(future.result())
    right = {"batch": 3, "queries": 2, "heads": 20, "page_size": 64, "pages": 9, "pdl": 1}
    right |= {"query_batch": 23040, "query_row": 11520, "query_head": 576, "tile_overhead": 4}
    right |= {"cut_overhead": 4}
    right |= {"cache_page": 36864, "cache_slot": 576, "table_row": 5}
    right |= {"out_batch": 20480, "out_row": 10240, "out_head": 512, "lse_batch": 2, "lse_head": 6}

    def ordered(**values: int) -> tuple[int, ...]:
        tensors = dict.fromkeys(ARGUMENTS.tensors, 0)
        return ARGUMENTS.ordered(tensors, {**right, **values}, {"scale": 1.0})[1]

    assert kernel.workspace_bytes(ordered()) > 2 * 132 * 64 * 512 * 4
    assert kernel.workspace_bytes(ordered(heads=4096, queries=64)) == 8, "nothing is divided"
    wrong = {"batch": 0, "queries": 65, "heads": 0, "page_size": 40, "pages": 0, "query_row": 4}
    wrong |= {"cache_slot": 577, "tile_overhead": -1, "table_row": -1}
    wrong |= {"cut_overhead": -1, "lse_head": -1}
    for name, value in wrong.items():
        integers = ordered(**{name: value})
        with pytest.raises(BenchmarkError):
            kernel.workspace_bytes(integers)
        with pytest.raises(BenchmarkError):
            kernel.launch((256,) * 6, integers, (1.0,), 256, 0)
    for addresses, scale in (((264, *(256,) * 5), 1.0), ((0,) * 6, 1.0), ((256,) * 6, 0.0)):
        with pytest.raises(BenchmarkError):
            kernel.launch(addresses, ordered(), (scale,), 256, 0)


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("case", CASES)
def test_an_emulated_kernel_is_right(
    compiler: Compiler, case: str, tmp_path: Path, long_mode: bool
) -> None:
    kernels = [CHUNKS, WHOLE, *QUANTISED]
    if case.startswith("two blocks"):
        kernels = [*kernels, PAIR, WHOLE_PAIR] if long_mode else [PAIR, WHOLE_PAIR]
    for spec in kernels:
        assert emulated(spec, CASES[case], compiler.toolchain.nvcc, tmp_path) == ""


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("name", MUTANTS)
def test_the_emulator_finds_what_is_wrong(compiler: Compiler, name: str, tmp_path: Path) -> None:
    case = (16, 4, 64, 1, 1, 0, 610, 0, 3)
    nvcc = compiler.toolchain.nvcc
    assert emulated(CHUNKS, case, nvcc, tmp_path, MUTANTS[name], orders=2) != ""


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("name", QUANTISED_MUTANTS)
def test_the_emulator_finds_what_is_wrong_with_quantised_rows(
    compiler: Compiler, name: str, tmp_path: Path
) -> None:
    case = (16, 4, 64, 1, 1, 0, 610, 0, 3)
    nvcc = compiler.toolchain.nvcc
    mutant = QUANTISED_MUTANTS[name]
    assert emulated(QUANTISED[1], case, nvcc, tmp_path, mutant, orders=2) != ""
