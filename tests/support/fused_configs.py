"""Configs of the fused attention family, for the tests of its kernels."""

from __future__ import annotations

from collections.abc import Callable

from tuner.config import Config, Value


def maker(early_exp: int = 0, ping_pong: bool = False) -> Callable[..., Config]:
    """A function that makes well-formed configs for heads that are not grouped.

    Args:
        early_exp: for one score buffer, where a config names none.
        ping_pong: for one score buffer and two warp groups or more, likewise.
    """

    def make(groups: int, tile_n: int, score_buffers: int = 1, **more: Value) -> Config:
        """What may be off is off."""
        params: dict[str, Value] = {
            "warp_groups": groups,
            "tile_n": tile_n,
            "kv_stages": 2,
            "score_buffers": score_buffers,
            "q_in_registers": False,
            "persistent": False,
            "blocks_per_sm": 1,
            "splits": 1,
            "pdl": False,
            **more,
        }
        if params["splits"] > 1:
            params.setdefault("combine", "kernel")
        if score_buffers == 1:
            params.setdefault("early_exp", early_exp)
            if groups > 1:
                params.setdefault("ping_pong", ping_pong)
        return Config("fused_attention", params)

    return make
