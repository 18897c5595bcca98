"""Measurement of candidates on one GPU: worker processes, stopwatch, numerics gate, profiler."""
