#!/usr/bin/env bash
# nvidia-matmul-heuristics 0.1.0.27: the answers of getEx are not in the order of their own estimate,
# one tile and cluster is named several times, and e4m3 has answers under five letters (QQTST).
# Exits non-zero if this changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q nvidia-matmul-heuristics==0.1.0.27
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import nvMatmulHeuristics as library

target = library.NvMatmulHeuristicsTarget["CUTLASS3"]
handle = library.NvMatmulHeuristicsInterfaceEx(
    backend=target,
    flags=library.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
    load_discovery_implicitly=True,
    gpu=library.NvMatmulHeuristicsNvidiaGpu["H100_SXM"],
)
backend = handle.createBackend(target)
layout = library.NvMatmulHeuristicsMatmulLayout["TN_ROW_MAJOR"]
print("nvidia-matmul-heuristics", version("nvidia-matmul-heuristics"))
seen = {}
for precision in ("HSH", "TSS", "QQTST"):
    problem = handle.makeNvMatmulHeuristicsProblem(512, 14336, 4096, layout, 1)
    answers = handle.getEx(problem, 128, backend, precision=precision)
    times = [answer["runtime"] for answer in answers]
    tiles = {
        (k.cta_tile_m, k.cta_tile_n, k.cta_tile_k, k.cluster_m, k.cluster_n)
        for k in (answer["kernel"] for answer in answers)
    }
    falls = sum(later < earlier for earlier, later in zip(times, times[1:]))
    best = times.index(min(times))
    print(f"{precision}: {len(answers)} answers, {len(tiles)} tiles and clusters, "
          f"{falls} times a later one is estimated faster, the least at place {best}")
    seen[precision] = len(answers) > len(tiles) > 0 and falls > 0
assert all(seen.values()), seen
PYTHON
