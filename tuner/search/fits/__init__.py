"""Fits of constants that ship to measured files: a module each, with `refit`."""

from __future__ import annotations

from collections.abc import Mapping

FITS: Mapping[str, str] = {
    "cost": "cost models of the families, from recordings (default: those that ship)",
    "stopping": "seconds and loss of a search, from `scripts/bench search`",
    "corrections": "rates at calls of models, from `scripts/bench population`",
    "ratios": "PyTorch's times over own kernels' at calls, from `scripts/bench population`",
    "rates": "rates of kernels that rules choose among, from `scripts/bench products`",
    "backward": "costs of gradients of attention, from `scripts/bench backward`",
    "engines": "an engine's times over tuned kernels', from `scripts/bench paged`",
    "peers": "times over peers' kernels', from `scripts/bench population --preset peers`",
    "paged": "splits of paged decoding, from `scripts/bench paged`",
}
"""Fits beside that of portfolios, and their files, by name: that of a module without ``_fit``."""
