"""Attention by the fastest kernel that is known, on any machine.

Run it as `python examples/01_first_call.py`. On an H100 or H200 a tuned kernel answers once
`tuner build` has compiled it. PyTorch answers everywhere else, with the same arguments.
"""

import torch

import tuner

device = "cuda" if torch.cuda.is_available() else "cpu"
query, key, value = torch.randn(3, 1, 16, 1024, 64, device=device).to(torch.float16)

out = tuner.attention(query, key, value, is_causal=True)
expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
print(f"largest difference to PyTorch's: {(out - expected).abs().max().item():.1e}")

# The decision behind the call, also without a GPU: the measured ranking of this shape on an H200.
answer = tuner.lookup("S=1024,D=64,causal=1", gpu="H200")
assert answer is not None
winner = answer.entry.winner
print(f"on an H200: {winner.config.family}, {winner.latency_us:.1f} us")

# Who answered: hits are tuned kernels, fallbacks are PyTorch's, each with its reason.
print(tuner.stats())
