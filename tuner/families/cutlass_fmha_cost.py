"""What a config of `cutlass_fmha` should cost."""

from __future__ import annotations

from tuner.families.cutlass_fmha_shape import TMA, Shape
from tuner.hardware import EXP_PER_CLOCK_SM, TENSOR_FLOPS_PER_CLOCK_SM, Gpu
from tuner.problem import AttentionProblem

#: Sustained clock against the highest: 1.755 of 1.98 GHz, under load on one H200.
SUSTAINED_CLOCK = 1.755 / 1.98
#: Launch, first loads and last stores, microseconds.
FIXED_US = 3.5
#: Host and device time between the calls of one problem in a graph, microseconds.
CALL_US = 2.0
#: Clocks of one K/V step that nothing hides: a lone warp group, and two or more of them.
STEP_CLOCKS_ALONE = 640
STEP_CLOCKS = 150
#: Clocks more a step where the ring is too short to load ahead: about one trip to the L2.
SHALLOW_CLOCKS = 640
#: Clocks a block spends outside its steps; a persistent one loads its next tile meanwhile.
BLOCK_CLOCKS = 700
PERSISTENT_CLOCKS = 400
#: Share of the longest tile by which the last multiprocessor ends after the average one.
IMBALANCE = {False: 0.45, True: 0.15}


def predict_us(problem: AttentionProblem, shape: Shape, gpu: Gpu, calls: int = 1) -> float:
    """Steps of the busiest multiprocessor, each its tensor-core and exponential clocks in turn.

    The collectives wait for S before the softmax and queue no other product behind it, so the two
    hardly overlap: measured times fit their plain sum. One H200 (fp16, CUDA graphs) took, and the
    estimate is off by: (1,16,512,64) 64x128 KernelTma 7.3 us, +5 %; (1,16,1024,64) 128x128
    Cooperative 13.5 us with 4 stages and 16.4 with 3, both +3 %; (16,16,2048,64) 192x128 683 us,
    -4 %; and, if 128x128 was what ran, (1,8,8192,64) 318 us, +2 %; (4,16,2048,128) 236 us, +2 %;
    (2,16,8192,128) 1893 us, 0 %; causal (1,32,1024,128) Pingpong 27.2 us, -2 %. Its constants
    were chosen on these points; nothing else has been compared.

    Args:
        problem: what is computed.
        shape: the config's numbers.
        gpu: where.
        calls: launches that share the work.
    """
    row_blocks = -(-problem.seqlen_q // shape.tile_m)
    heads = problem.batch * problem.heads_q
    visits = [_visits(problem, shape, block) for block in _blocks(row_blocks)]
    longest, mean = max(visits), sum(visits) / len(visits)
    step = shape.tile_m * shape.tile_n * _clocks_a_score(shape)
    waiting = STEP_CLOCKS_ALONE if shape.schedule == TMA else STEP_CLOCKS
    if shape.schedule != TMA and shape.kv_stages < 4:
        waiting += SHALLOW_CLOCKS
    own = PERSISTENT_CLOCKS if shape.is_persistent else BLOCK_CLOCKS
    rounds = -(-row_blocks * heads // (calls * gpu.sm_count))
    batches = -(-rounds // shape.resident_blocks)
    if problem.is_causal:
        average = mean * row_blocks * heads / (calls * gpu.sm_count)
        steps = max(longest, average + IMBALANCE[shape.is_descending] * longest)
        waits = max(longest, steps / shape.resident_blocks)
    else:
        steps, waits = rounds * mean, batches * mean
    clocks = steps * step + waits * waiting + BLOCK_CLOCKS + (batches - 1) * own
    clock_mhz = gpu.clock_max_mhz * SUSTAINED_CLOCK
    return FIXED_US + (calls - 1) * CALL_US + calls * clocks / clock_mhz


def _clocks_a_score(shape: Shape) -> float:
    """Tensor-core clocks of both products plus the exponential's, of one multiprocessor."""
    tensor = 4 * shape.head_tile / TENSOR_FLOPS_PER_CLOCK_SM
    return tensor + 1 / EXP_PER_CLOCK_SM


def _blocks(row_blocks: int) -> range:
    """At most 64 blocks of query rows, evenly spread, the last one among them."""
    stride = max(1, row_blocks // 64)
    return range(row_blocks - 1, -1, -stride)


def _visits(problem: AttentionProblem, shape: Shape, block: int) -> int:
    """K/V tiles of one block, as the template's mask counts them."""
    columns = problem.seqlen_kv
    if problem.is_causal:
        columns = min(columns, (block + 1) * shape.tile_m, problem.seqlen_q)
    return -(-columns // shape.tile_n)
