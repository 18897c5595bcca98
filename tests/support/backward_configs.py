"""Parameters of backward kernels, for the tests of the family."""

from __future__ import annotations

from tuner.config import Value

BASE: dict[str, Value] = {
    "warp_groups": 2,
    "tile_m": 64,
    "stages": 2,
    "ds_stages": 2,
    "swap_dq": False,
    "dq": "bulk",
    "late_dq": False,
    "early_exp": 0,
    "v_registers": 0,
    "transpose_ds": False,
    "rotate": False,
    "persistent": False,
    "section_heads": 8,
    "pdl": True,
}
