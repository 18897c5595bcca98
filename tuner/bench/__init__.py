"""Kernels against the strongest of their field: what is timed, how a run goes, what it says.

`suites` names the problems, `contenders` who takes part, `compare` runs them side by side, and
`results` holds what was seen. A benchmark with a question of its own is one module here with
``main(argv) -> int``, run by ``scripts/bench NAME``. Benchmarks write results; they assert
nothing about speed.
"""
