"""Fits of constants that ship to measured files: a module each, with `refit`, or a family's."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.hardware import Gpu

if TYPE_CHECKING:
    from tuner.search.fits.refit import Refit

FITS: Mapping[str, str] = {
    "cost": "cost models of the families, from recordings (default: those that ship)",
    "stopping": "seconds and loss of a search, from `scripts/bench tuner --preset recorded`",
    "corrections": "rates at calls of models, from `scripts/bench population`",
    "ratios": "PyTorch's times over own kernels' at calls, from `scripts/bench population`",
    "kernels": "rates at calls of models, from `scripts/bench tuner --preset kernels`",
    "shapes": "rates of each term at calls, from `scripts/bench cliffs --preset kernels`",
    "rates": "rates of kernels that rules choose among, from `scripts/bench products`",
    "backward": "costs of gradients of attention, from `scripts/bench backward`",
    "engines": "an engine's times over tuned kernels', from `scripts/bench paged`",
    "peers": "times over peers' kernels', from `scripts/bench population --preset peers`",
    "peer_times": "rates of peers' kernels, from `scripts/bench cliffs`",
    "paged": "splits of paged decoding, from `scripts/bench paged`",
}
"""Fits beside that of portfolios, and their files, by name."""


def fit(name: str, files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """One of `FITS`: that of the module ``NAME_fit`` here, else a family's.

    Raises:
        ConfigError: when a file is wrong.
    """
    from tuner.families import families
    from tuner.search.fits import refit

    for member in families().values():
        if member.fit[0] == name:
            return refit.of_family(member.fit[1], files, gpu)
    module = importlib.import_module(f"{__name__}.{name}_fit")
    result: Refit = module.refit(files, gpu, only)
    return result
