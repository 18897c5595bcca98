"""GPUs and their limits; every number with its source.

Sources:

- [CPG] CUDA C++ Programming Guide 13.0, "Compute Capabilities"
- [H100] NVIDIA H100 Tensor Core GPU Architecture whitepaper
- [DS] NVIDIA H200 and H100 SXM datasheets
- [PB] NVIDIA product briefs and datasheets of the other parts
- [M] measured on one H200 (driver 580.159, CUDA 13.0, October 2026)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from tuner.errors import ConfigError

#: What the CUTLASS families' instructions (TMA, WGMMA) are compiled for: sm_90a.
HOPPER = "9.0"
#: The oldest compute capability served: cp.async, and bf16 in the tensor cores [CPG].
OLDEST_CAPABILITY = "8.0"
#: Shared memory one block may use on sm_90: 227 KiB [CPG]; CUTLASS's sm90_smem_capacity_bytes.
SMEM_PER_BLOCK_BYTES = 232448
#: Shared memory of one multiprocessor: 228 KiB, of which each resident block reserves 1 KiB [CPG].
SMEM_PER_SM_BYTES = 233472
SMEM_RESERVED_PER_BLOCK_BYTES = 1024
#: 32-bit registers of one multiprocessor, and the most one thread can hold [CPG].
REGISTERS_PER_SM = 65536
REGISTERS_PER_THREAD = 255
#: Threads of a warp and of a warp group, the unit that issues WGMMA (PTX ISA, wgmma).
WARP = 32
WARP_GROUP = 128
#: K extent of one WGMMA instruction, bytes of an operand: 16 elements of 16 bits, 32 of 8 (same).
WGMMA_K_BYTES = 32
#: Largest cluster every sm_90 part schedules; 16 needs a non-portable launch [CPG].
MAX_PORTABLE_CLUSTER = 8
#: Global addresses and strides of a TMA tensor map are multiples of this (CUDA driver API).
TMA_ALIGNMENT_BYTES = 16
#: Byte strides of a tensor map stay below this (CUDA driver API, cuTensorMapEncodeTiled).
MAX_TMA_STRIDE_BYTES = 2**40
#: Dense fp16/bf16 tensor-core operations of one SM a clock: 1024 FMA x 4 tensor cores / 2 [H100].
TENSOR_FLOPS_PER_CLOCK_SM = 4096
#: The same by compute capability: peak of a part's datasheet over its multiprocessors and boost
#: clock, as a power of two (A100: 312 TFLOP/s, 108, 1.41 GHz; A40: 149.7, 84, 1.74; L40S: 362,
#: 142, 2.52; B200: 2250, 148, 1.85; RTX PRO 6000: 504, 188, 2.62).
TENSOR_FLOPS_BY_CAPABILITY: Mapping[str, int] = {
    "8.0": 2048,
    "8.6": 1024,
    "8.9": 1024,
    HOPPER: TENSOR_FLOPS_PER_CLOCK_SM,
    "10.0": 8192,
    "12.0": 1024,
}
#: The same of parts whose tensor cores are slower than their capability's (H20: 148 TFLOP/s, 78
#: multiprocessors, 1.98 GHz; as a power of two).
TENSOR_FLOPS_BY_NAME: Mapping[str, int] = {"NVIDIA H20": 1024}
#: Rate of 8-bit operands over that of 16-bit ones: 1979 dense TFLOP/s against 989 [H100, table 2].
E4M3_RATE = 2
#: KiB of shared memory one block may use [CPG]; the least of them for parts that are not listed.
SMEM_KIB_BY_CAPABILITY: Mapping[str, int] = {
    "8.0": 163,
    "8.6": 99,
    "8.7": 163,
    "8.9": 99,
    HOPPER: SMEM_PER_BLOCK_BYTES >> 10,
    "10.0": 227,
    "10.3": 227,
    "11.0": 227,
    "12.0": 99,
    "12.1": 99,
}
#: Memory bandwidth of a part whose driver does not say its clock: the most that any has (B200,
#: datasheet), for a floor is made of it.
MAX_MEMORY_GBS = 8000.0
#: Share of the datasheet's bandwidth that kernels reach: 4300 of 4800 GB/s on one H200 [M].
REACHED_SHARE = 0.896
#: exp2 results of one SM's special-function units a clock [CPG, "Arithmetic Instructions"].
EXP_PER_CLOCK_SM = 16
#: One empty kernel inside a CUDA graph, microseconds [M].
GRAPH_LAUNCH_US = 0.86


@dataclass(frozen=True)
class Gpu:
    """One GPU model as the store names it. H100 and H200 are different GPUs."""

    name: str
    """NVML's product name, as in ``NVIDIA H200``."""
    compute_capability: str
    sm_count: int
    clock_max_mhz: int
    """Highest SM clock the part boosts to."""
    memory_gbs: float
    """Memory bandwidth, GB/s (10^9), datasheet."""
    l2_bytes: int

    @property
    def identity(self) -> str:
        """The part that separates problems in the store."""
        return f"{self.name}|{self.compute_capability}|{self.sm_count}"

    @property
    def tensor_flops_per_clock_sm(self) -> int:
        """Dense fp16; the most of all parts where this one's is not known: a floor, never a
        ceiling, is made of it.
        """
        rates = TENSOR_FLOPS_BY_CAPABILITY
        of_capability = rates.get(self.compute_capability, max(rates.values()))
        return TENSOR_FLOPS_BY_NAME.get(self.name, of_capability)

    @property
    def peak_tflops(self) -> float:
        """Dense fp16 tensor-core peak at the highest clock: nothing runs faster."""
        return self.tensor_flops_per_clock_sm * self.sm_count * self.clock_max_mhz / 1e6

    @property
    def has_rates(self) -> bool:
        """True if clock and memory bandwidth are those of the whole part, by its description or by
        its driver. A slice of a GPU (MIG) shares the memory, so its bandwidth is not known.
        """
        is_known = self.clock_max_mhz > 0 and 0 < self.memory_gbs < MAX_MEMORY_GBS
        return is_known and self.l2_bytes > 0 and " MIG " not in f" {self.name} "

    def shares_kernels(self, other: Gpu) -> bool:
        """True if one GPU's kernels are the other's: the machine code, the shared memory and the
        registers of a multiprocessor belong to the compute capability. So a kernel is correct on
        both or on none, and a config is legal on both or on none.
        """
        return self.compute_capability == other.compute_capability

    def shares_decisions(self, other: Gpu) -> bool:
        """True if a ranking of kernels that was measured on one GPU serves on the other.

        It ranks the same machine code in the same waves of blocks, so they need as many
        multiprocessors. An H100 and an H200 measured 46 problems (22 November 2026). At the 17
        where the H100 timed the H200's best own kernel, it was within 2.3 % of the H100's best. An
        own kernel's lead over the vendors' shrinks where both wait for memory. None that led took
        more than 1.03 times the fastest vendor's time on the H100.
        """
        return self.shares_kernels(other) and self.sm_count == other.sm_count

    @property
    def reached_gbs(self) -> float:
        """GB/s of its memory that kernels reach."""
        return REACHED_SHARE * self.memory_gbs

    @property
    def is_served(self) -> bool:
        """True when some family has kernels for it."""
        return capability_numbers(self.compute_capability) >= capability_numbers(OLDEST_CAPABILITY)

    def floor_us(self, flops: int, bytes_moved: int) -> float:
        """Time that no kernel can beat. It is the tensor cores' work at the highest clock, or the
        bytes that cannot be in L2 at the datasheet's bandwidth of memory.

        Holds no term that a kernel could avoid (exponentials can be polynomials, launches can
        overlap, inputs up to the L2's size can be there already).
        """
        arithmetic = flops / (self.peak_tflops * 1e6)
        memory = max(0, bytes_moved - self.l2_bytes) / (self.memory_gbs * 1e3)
        return max(arithmetic, memory)


#: Shipped descriptions, used where no GPU is present. Clocks: nvidia-smi -q "Max Clocks" [M] for
#: H200; memory bandwidth [DS], [PB]; L2 as cudaDeviceProp reports it [M], [H100]. Only the first
#: two were measured.
GPUS: dict[str, Gpu] = {
    "H200": Gpu("NVIDIA H200", "9.0", 132, 1980, 4800.0, 62914560),
    "H100": Gpu("NVIDIA H100 80GB HBM3", "9.0", 132, 1980, 3350.0, 52428800),
    "H100-PCIe": Gpu("NVIDIA H100 PCIe", "9.0", 114, 1755, 2000.0, 52428800),
    "H100-NVL": Gpu("NVIDIA H100 NVL", "9.0", 132, 1785, 3938.0, 52428800),
    "H200-NVL": Gpu("NVIDIA H200 NVL", "9.0", 132, 1785, 4800.0, 62914560),
    "GH200": Gpu("NVIDIA GH200 480GB", "9.0", 132, 1980, 4000.0, 62914560),
    "GH200-144GB": Gpu("NVIDIA GH200 144G HBM3e", "9.0", 132, 1980, 4900.0, 62914560),
    "H800": Gpu("NVIDIA H800", "9.0", 132, 1980, 3350.0, 52428800),
    "H800-PCIe": Gpu("NVIDIA H800 PCIe", "9.0", 114, 1755, 2000.0, 52428800),
    "H20": Gpu("NVIDIA H20", "9.0", 78, 1980, 4000.0, 62914560),
}
#: What commands assume on a machine without a GPU.
DEFAULT_GPU = GPUS["H200"]


@cache
def capability_numbers(text: str) -> tuple[int, ...]:
    """``8.6`` -> (8, 6), which compares as versions do."""
    return tuple(map(int, text.split(".")))


def smem_per_block_bytes(capability: str) -> int:
    """Most shared memory of a block."""
    sizes = SMEM_KIB_BY_CAPABILITY
    return sizes.get(capability, min(sizes.values())) << 10


def bandwidth_gbs(clock_khz: int, bus_bits: int) -> float:
    """GB/s of a memory at double data rate, as its driver reports clock and width; 0: it does not.

    The datasheet's figure is up to 4 % less (H200: 4917 reported, 4800 stated).
    """
    return round(clock_khz * 2 * bus_bits / 8 / 1e6, 1)


def gpu_by_name(text: str) -> Gpu:
    """Find a shipped description by short or full name, in any case, with ``NVIDIA`` or without.

    Raises:
        ConfigError: when the name is not known; says which are.
    """

    def plain(name: str) -> str:
        return "-".join(name.casefold().removeprefix("nvidia ").split())

    for short, gpu in GPUS.items():
        if plain(text) in (plain(short), plain(gpu.name)):
            return gpu
    raise ConfigError(f"GPU '{text}' is not known (allowed: {', '.join(GPUS)})")
