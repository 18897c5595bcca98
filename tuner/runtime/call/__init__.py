"""The way of a call: its checks, its plan, and what PyTorch answers in a plan's place."""
