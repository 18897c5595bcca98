"""One candidate on one GPU: worker processes, stopwatch, numerics gate, profiler."""
