"""A training step whose attention is served, without a change of the model.

`tuner.enabled()` puts the kernels behind PyTorch's own function, forward and backward. Calls that
no kernel serves stay PyTorch's. Gradients are served where a kernel for them is proven.
"""

import torch

import tuner


class Block(torch.nn.Module):
    """Attention over heads of 64 columns, and a projection."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Block().to(device, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(2, 256, 512, device=device, dtype=torch.bfloat16)

losses = []
with tuner.enabled():
    for _ in range(5):
        loss = torch.nn.functional.mse_loss(model(x).float(), x.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

print("losses:", " ".join(f"{loss:.3f}" for loss in losses))
assert losses[-1] < losses[0]
print(tuner.stats())  # empty without a GPU: PyTorch's function on a CPU is left alone
