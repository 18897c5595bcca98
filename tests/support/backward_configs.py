"""Parameters of backward kernels, for the tests of the family."""

from __future__ import annotations

from tuner.config import Value
from tuner.families.fused_attention_backward.rule import USUAL

BASE = USUAL
#: Every lever, once at least.
LEVERS: tuple[dict[str, Value], ...] = (
    {},
    {"dq": "ordered"},
    {"dq": "direct", "section_heads": 1},
    {"tile_m": 128, "early_exp": 50},
    {"stages": 3, "ds_stages": 1, "dq": "direct", "pdl": False},
    {"ds_stages": 1, "early_exp": 100, "dq": "ordered", "section_heads": 2},
    {"swap_dq": True, "tile_m": 64},
    {"swap_dq": True, "tile_m": 96},
    {"warp_groups": 1},
    {"tile_m": 128, "dq": "ordered", "ds_stages": 1},
    {"ds_stages": 1},
    {"dq": "direct", "transpose_ds": True},
    {"ds_stages": 1, "dq": "ordered", "stages": 1},
    {"rotate": True, "dq": "ordered"},
    {"late_dq": True, "transpose_ds": True, "rotate": True},
    {"late_dq": True, "early_exp": 50, "tile_m": 128},
    {"v_registers": 50, "transpose_ds": True},
    {"v_registers": 100, "tile_m": 128},
    {"persistent": True},
    {"persistent": True, "dq": "ordered", "section_heads": 2},
)
