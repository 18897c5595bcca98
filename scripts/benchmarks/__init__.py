"""Benchmarks for developers: one module each, ``main(argv) -> int``, run by ``scripts/bench NAME``.

They write results and assert nothing about speed. Results and pictures lie beside them.
"""

import os

# Nothing compiles beside a measurement.
os.environ.setdefault("TUNER_BUILD_ON_MISS", "0")
