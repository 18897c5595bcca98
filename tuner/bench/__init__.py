"""Benchmarks of own kernels against vendors' and peers' kernels.

`suites` and `presets` define the problems, `contenders` the kernels of a row, `comparison` runs
them interleaved, and `results` holds the times. Benchmarks write results without asserting any
speed. Special benchmarks are in `scripts/benchmarks/`.
"""
