"""Benchmarks for developers: one module each, ``main(argv) -> int``, run by ``scripts/bench NAME``.

They write results and assert nothing about speed. Results and pictures lie beside them.
"""
