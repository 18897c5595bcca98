"""One shape tuned from Python, and its ranking.

With a Hopper GPU and nvcc the sweep compiles and measures kernels. Elsewhere it replays a recorded
sweep of the same shape, and says so: replayed times are never served.
"""

import tempfile

import tuner

# A store of its own, which leaves yours alone. Without `store=` the result is kept and served.
with tempfile.TemporaryDirectory() as folder:
    outcome = tuner.sweep("S=1024,D=64", store=f"{folder}/store.sqlite")

print(f"{outcome.provenance}: {len(outcome.ranking)} kernels in the final pass")
for measurement in outcome.ranking[:3]:
    print(f"{measurement.latency_us:6.1f} us  {measurement.config}")
