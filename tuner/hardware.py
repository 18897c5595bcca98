"""What the chip offers; every number with its source.

Sources: [CPG] CUDA C++ Programming Guide 13.0, "Compute Capabilities"; [H100] NVIDIA H100 Tensor
Core GPU Architecture whitepaper; [DS] NVIDIA H200 and H100 SXM datasheets; [M] measured on one
H200 (driver 580.159, CUDA 13.0, October 2026).
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.errors import ConfigError

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
#: Largest cluster every sm_90 part schedules; 16 needs a non-portable launch [CPG].
MAX_PORTABLE_CLUSTER = 8
#: Global addresses and strides of a TMA tensor map are multiples of this (CUDA driver API).
TMA_ALIGNMENT_BYTES = 16
#: Dense fp16/bf16 tensor-core operations of one SM a clock: 1024 FMA x 4 tensor cores / 2 [H100].
TENSOR_FLOPS_PER_CLOCK_SM = 4096
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
    def peak_tflops(self) -> float:
        """Dense fp16 tensor-core peak at the highest clock: nothing runs faster."""
        return TENSOR_FLOPS_PER_CLOCK_SM * self.sm_count * self.clock_max_mhz / 1e6

    def floor_us(self, flops: int, bytes_moved: int) -> float:
        """Time that no kernel can beat: tensor-core work at the highest clock, or the bytes that
        cannot be in L2 through memory at its datasheet bandwidth.

        Holds no term that a kernel could avoid (exponentials can be polynomials, launches can
        overlap, inputs up to the L2's size can be there already).
        """
        arithmetic = flops / (self.peak_tflops * 1e6)
        memory = max(0, bytes_moved - self.l2_bytes) / (self.memory_gbs * 1e3)
        return max(arithmetic, memory)


#: Shipped descriptions, used where no GPU is present. Clocks: nvidia-smi -q "Max Clocks" [M] for
#: H200; memory bandwidth [DS]; L2 as cudaDeviceProp reports it [M], [H100].
GPUS: dict[str, Gpu] = {
    "H200": Gpu("NVIDIA H200", "9.0", 132, 1980, 4800.0, 62914560),
    "H100": Gpu("NVIDIA H100 80GB HBM3", "9.0", 132, 1980, 3350.0, 52428800),
    "H100-PCIe": Gpu("NVIDIA H100 PCIe", "9.0", 114, 1755, 2000.0, 52428800),
}
#: What commands assume on a machine without a GPU.
DEFAULT_GPU = GPUS["H200"]


def gpu_by_name(text: str) -> Gpu:
    """Find a shipped description by short or full name.

    Raises:
        ConfigError: when the name is not known; says which are.
    """
    for short, gpu in GPUS.items():
        if text.casefold() in (short.casefold(), gpu.name.casefold()):
            return gpu
    raise ConfigError(f"GPU '{text}' is not known (allowed: {', '.join(GPUS)})")
