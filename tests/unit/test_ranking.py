"""The order of a final pass and who takes part in it: ties, finalists."""

from __future__ import annotations

import pytest
from toys import BEST, GEMM, Toy, failed, latency, ok, vendors

from tuner.config import Config
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Status, is_tie
from tuner.search import ranking


class TestRanking:
    """Ties, finalists."""

    def config(self, n: int, family: str = "toy") -> Config:
        return Config(family, {"m": n, "n": 64, "k": 16, "raster": "m"})

    def test_tie_goes_to_own_then_workspace_then_digest_whatever_the_order(self) -> None:
        vendor = ok(Config("vendor_toy", {"library": "blas"}), 10.0, std_us=0.05)
        large = ok(self.config(1), 10.02, std_us=0.05, workspace_bytes=100)
        small = [ok(self.config(n), 10.05, std_us=0.05) for n in (2, 3)]
        small.sort(key=lambda m: m.config.digest)
        slower = ok(self.config(4), 10.2, std_us=0.05)
        wanted = [*small, large, vendor, slower]
        for order in (wanted, wanted[::-1], [slower, vendor, *small, large]):
            assert ranking.rank(order) == wanted

    def test_band_is_the_measured_noise_and_one_percent_at_most(self) -> None:
        one, close, far = (ok(self.config(n), us) for n, us in ((1, 10.0), (2, 10.05), (3, 10.15)))
        assert not is_tie(one, close), "0.1 % of noise each"
        loud = [m.but(std_us=0.5) for m in (one, close, far)]
        assert is_tie(loud[0], loud[1])
        assert not is_tie(loud[0], loud[2])

    def test_times_of_two_passes_are_not_ranked_together(self) -> None:
        final, quick = ok(self.config(1), 10.0, is_final=True), ok(self.config(2), 9.0)
        with pytest.raises(ValueError, match="quick times and final times"):
            ranking.rank([final, quick])
        assert ranking.rank([final, failed(self.config(2), Status.TIMEOUT)]) == [final]

    def test_failed_finals_have_no_place(self) -> None:
        assert ranking.rank([failed(BEST, Status.WRONG_RESULT)]) == []

    def test_finalists_are_the_best_every_near_family_and_all_vendors(self) -> None:
        near, far = ok(Config("near", {}), 12.9), ok(Config("far", {}), 13.1)
        own = [ok(c, latency(c)) for c in Toy().space(GEMM, DEFAULT_GPU)]
        chosen = ranking.finalists([far, near, *own, *vendors()], 4, lambda c: c.digest)
        assert [m.config.family for m in chosen] == ["toy"] * 4 + ["near", "vendor_toy"]
        assert chosen[0].config == BEST

    def test_kernels_nearly_as_fast_as_the_best_are_further_finalists(self) -> None:
        def chosen(us: list[float], near: int) -> list[float | None]:
            own = [ok(self.config(n), each) for n, each in enumerate(us)]
            found = ranking.finalists(own, 2, lambda c: c.digest, near)
            return [m.latency_us for m in found]

        us = [10.0, 10.1, 10.15, 10.45, 10.52, 11.5]
        assert chosen(us, 4) == us[:4], "5 % at most"
        assert chosen(us, 1) == us[:4], "short calls cost little"
        assert chosen([300 * one for one in us], 1) == [300 * one for one in us[:3]]
        assert chosen(us, 0) == us[:2]
        assert ranking.finalists([], 2, lambda c: c.digest, 4) == []

    def test_further_finalists_take_a_limited_time_together(self) -> None:
        for best_us, count in ((10.0, 36), (100.0, 24), (200.0, 12), (600.0, 4), (8000.0, 4)):
            own = [ok(self.config(n), best_us * (1 + 1e-4 * n)) for n in range(60)]
            found = ranking.finalists(own, 4, lambda c: c.digest, 4)
            assert len(found) == 4 + count

    def test_of_a_library_s_list_the_fastest_are_finalists(self) -> None:
        def plan(n: int) -> Config:
            return Config("vendor_plans", {"kernel": "plans", "engine": n})

        plans = [ok(plan(n), 20.0 - n) for n in range(8)]
        broken = failed(plan(9), Status.WRONG_RESULT)
        chosen = ranking.finalists([*plans, broken, *vendors()], 4, lambda c: c.digest)
        assert [m.latency_us for m in chosen] == [11.0, 13.0, 14.0, 15.0]
        assert [m.config.get("engine") for m in chosen] == [None, 7, 6, 5]

    def test_finalists_are_three_distinct_kernels_before_variants(self) -> None:
        own = [ok(c, latency(c)) for c in Toy().space(GEMM, DEFAULT_GPU)]
        chosen = ranking.finalists(own, 4, lambda c: str(c["m"]))
        assert [m.config["m"] for m in chosen] == [128, 64, 256, 128]
