"""Kernels against the strongest of their field: what is timed, how a run goes, what it says.

`suites` names the problems, `contenders` who takes part, `compare` runs them side by side, and
`results` holds what was seen. Benchmarks write results; they assert nothing about speed. Those with
a question of their own lie in `scripts/benchmarks/`.
"""
