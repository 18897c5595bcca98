"""``tuner develop fit NAME``: fits give what ships again from the files of its fit, and give
planted constants.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tuner import cli
from tuner.errors import ConfigError
from tuner.families.block_scaled_gemm import rates_fit, rates_of
from tuner.families.block_scaled_gemm.expected import Rates
from tuner.families.by_operation import AttentionDomain
from tuner.families.fitting import FitGroup
from tuner.families.fused_attention import paged_fit, paged_schedule
from tuner.families.fused_attention_backward import fit as backward_fit
from tuner.families.fused_attention_backward.rule import COSTS, work
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.problem import (
    AttentionBackwardProblem,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
)
from tuner.search import expectation, fits
from tuner.search.expectation import Credit
from tuner.search.fits import (
    FITS,
    corrections_fit,
    engines_fit,
    kernels_fit,
    peers_fit,
    ratios_fit,
    refit,
    stopping_fit,
)
from tuner.search.fits.corrections_fit import CORRECTIONS, TimedCall
from tuner.search.fits.refit import Refit
from tuner.search.fits.shapes_fit import shaped
from tuner.selection.portfolio import Portfolio, serving, shipped

pytest.importorskip("scipy", reason="fits need scipy")

FILES = {
    name: Path(__file__).parents[1] / "assets" / "fits" / f"{name}.jsonl.gz"
    for name in (
        "backward",
        "corrections",
        "engines",
        "kernels",
        "paged",
        "peer_times",
        "peers",
        "rates",
        "ratios",
        "shapes",
    )
}


@pytest.mark.parametrize("name", FITS)
def test_each_name_has_its_fit(name: str) -> None:
    with pytest.raises(ConfigError):
        fits.fit(name, [], DEFAULT_GPU, ["no family"])


class TestShared:
    def test_what_changes_stands_beside_what_ships(self) -> None:
        fit = Refit("module")
        fit.note("kernel", {"step": 2.0, "end": 3.0}, {"step": 2.004, "end": 3.3, "new": 1.0})
        lines = [line.split() for line in fit.text().splitlines()]
        assert lines[2:] == [
            ["kernel:", "end", "3", "3.3"],
            ["kernel:", "new", "1"],
            "1 of 3 constants as they ship".split(),
        ]
        assert "  kernel: end = 3.3" in fit.write().splitlines()
        same = Refit("module")
        same.note("kernel", {"step": 2.0}, {"step": 2.0})
        assert same.text() == "1 of 1 constants as they ship"

    def test_parts_are_judged_by_the_others(self) -> None:
        fit, seen = Refit("module"), []

        def fitted(items: list[tuple[str, float]]) -> dict[str, float]:
            seen.append({name for name, _ in items})
            return {"mean": fmean(us for _, us in items)}

        items = [("a", 1.0), ("a", 3.0), ("b", 4.0)]
        loss = lambda one, c: abs(one[1] - c["mean"])  # noqa: E731
        fit.fit(FitGroup("kernel", items, {"mean": 2.0}, fitted, loss, lambda one: one[0]))
        assert seen == [{"a", "b"}, {"b"}, {"a"}]
        assert fit.constants == {"kernel: mean": (2.0, 8 / 3)}
        assert fit.errors == [
            "kernel: 3 measured; mean loss as it ships 133.33%, worst 200.0%; "
            "fitted 111.11%, worst 166.7%; left out 200.00%, worst 300.0%"
        ]

    def test_rows_are_behind_the_heading_and_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text(
            '{"bench": "paged"}\n{"case": "a", "us": {"tuner own": 3}}\n{"case": "b"}\n{"ca'
        )
        found = [{"case": "a", "us": {"own": 3}}, {"case": "b", "us": {}}]
        assert refit.rows([path, path]) == found * 2
        packed = tmp_path / "rows.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert refit.rows([packed]) == refit.rows([path])
        with pytest.raises(ConfigError, match="no row to fit to"):
            refit.rows([])
        for text in ("{}\nno json\n", "{}\n[1]\n"):
            path.write_text(text)
            with pytest.raises(ConfigError, match=r"rows\.jsonl is not a bench's file"):
                refit.rows([path])
        with pytest.raises(ConfigError, match="is not a bench's file"):
            refit.rows([tmp_path])


class TestCommand:
    def test_it_prints_a_module_s_constants_on_demand(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["fit", "backward", str(FILES["backward"])]) == 0
        assert "own deterministic: TFLOP/s D=256 causal" in (said := capsys.readouterr().out)
        assert cli.main(["fit", "backward", str(FILES["backward"]), "--write"]) == 0
        assert capsys.readouterr().out.startswith(said + "constants of tuner.families.")

    def test_rows_of_another_bench_are_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        for name, of in (("corrections", "backward"), ("backward", "paged")):
            assert cli.main(["fit", name, str(FILES[of])]) == cli.WRONG_INPUT
            assert f"the rows are not of `scripts/bench {BENCHES[name]}`" in capsys.readouterr().err
        assert cli.main(["fit", "rates", str(FILES["backward"])]) == cli.WRONG_INPUT
        assert "no kernel of a rule is timed" in capsys.readouterr().err

    def test_files_need_a_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["fit", "--write"]) == cli.WRONG_INPUT
        assert "FILE and --write need a NAME (allowed: cost, " in capsys.readouterr().err
        assert cli.main(["fit", "corrections", "--gpu", "H100"]) == cli.WRONG_INPUT
        assert "no corrections ship for NVIDIA H100" in capsys.readouterr().err


BENCHES = {"corrections": "population", "backward": "backward"}


class TestBackward:
    def test_costs_are_found_again(self) -> None:
        """Times by a fixed part, bytes and products."""
        times = []
        for length in (512, 1024, 2048, 4096):
            problem = AttentionBackwardProblem(length, length, 128, heads_q=32, is_causal=True)
            flops, moved = (amount / 1e6 for amount in work("own", problem, DEFAULT_GPU))
            us = 12.5 + 1e3 * moved / 2500 + flops / 600
            times.append(backward_fit.TimedGradients("D", flops, moved, us))
        found = backward_fit.fitted(times)
        assert found == {"us": 12.5, "GB/s": 2500.0, "D": pytest.approx(600)}
        assert all(one.away(found) == pytest.approx(0.0, abs=1e-6) for one in times)
        assert backward_fit.fitted(times, (9.0,))["us"] == 9.0

    def test_what_ships_is_the_fit_to_its_file(self) -> None:
        """But for the own deterministic kernels with sections."""
        found = fits.fit("backward", [FILES["backward"]], DEFAULT_GPU)
        changed = {name for name, (old, new) in found.constants.items()
                   if old not in (new, round(new))}  # fmt: skip
        assert len(found.constants) == 82
        sections = {f"own deterministic: TFLOP/s D={n} causal" for n in (64, 128, 256)}
        assert changed == sections
        assert {one.split(":")[0] for one in found.errors} == {
            name + " deterministic" * is_ordered for name, is_ordered in COSTS
        }


class TestPaged:
    BATCHES = paged_fit.timed(refit.rows([FILES["paged"]]), DEFAULT_GPU)

    def test_the_chosen_schedules_are_near_the_fastest(self) -> None:
        """1.025 in the mean; the fastest schedules of other batches would take 1.2."""
        losses = [
            paged_fit.loss(one, paged_schedule.RATES[one[0].batch.instance]._asdict())
            for one in self.BATCHES
        ]
        assert len(losses) == 618
        assert fmean(losses) < 0.04 and max(losses) < 0.6

    def test_constants_are_those_of_a_fit(self) -> None:
        batches = [one for one in self.BATCHES if one[0].batch.instance == 128]
        found = paged_fit.fitted(batches)
        assert found == pytest.approx(paged_schedule.RATES[128]._asdict(), rel=0.05)

    def test_the_engines_ratios_that_ship_are_those_of_its_batches(self) -> None:
        found = engines_fit.refit([FILES["engines"]], GPUS["H200"])
        ((path, text),) = found.documents.items()
        assert path.read_text() == text
        assert len(found.errors) == 12

    def test_rows_without_schedules_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        row = refit.rows([FILES["paged"]])[0]
        path.write_text("{}\n" + json.dumps({**row, "schedules": {"2/64/3/4/16/1": 9.0}}) + "\n")
        with pytest.raises(ConfigError, match="no schedule was timed"):
            fits.fit("paged", [path], DEFAULT_GPU)


def timed(model: str, k: int, measured_us: float, us: float = 5.0) -> TimedCall:
    return TimedCall(model, us, measured_us, k**0.25)


class TestCorrections:
    def test_one_outlier_does_not_move_the_fit(self) -> None:
        sizes = (256, 625, 1296, 2401, 4096)
        calls = [timed("a", k, 5.0 - 2.0 + 0.5 * k**0.25) for k in sizes]
        found = CORRECTIONS["few PyTorch"].fitted([*calls, timed("b", 1296, 60.0)])
        assert found == pytest.approx({"launch": -2.0, "depth": 0.5}, abs=0.02)

    def test_what_ships_is_the_fit_to_its_file(self) -> None:
        found = corrections_fit.refit([FILES["corrections"]], GPUS["H200"]).constants
        limits = {
            "few own: launch": 0.1,  # factors of kernels are fitted after it
            "few PyTorch: launch": 0.05,
            "few PyTorch: depth": 0.01,
            "narrow own: launch": 0.1,
        }
        assert found.keys() == limits.keys()
        for name, (ships, fitted) in found.items():
            assert ships == pytest.approx(fitted, abs=limits[name]), name

    def test_a_file_without_such_calls_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="no call of these files"):
            corrections_fit.calls([], GPUS["H200"])

    def test_the_ratios_that_ship_are_those_of_its_calls(self) -> None:
        files = [FILES[name] for name in ("corrections", "ratios", "kernels")]
        found = ratios_fit.refit(files, GPUS["H200"])
        assert len(found.documents) == 3
        for path, text in found.documents.items():
            assert path.read_text() == text, path.name
        before, by_others = found.errors
        assert "87 below 0.97" in before and "30 below 0.97" in by_others

    def test_the_peers_that_ship_are_those_of_its_calls(self) -> None:
        found = peers_fit.refit([FILES["peers"]], GPUS["H200"])
        ((path, text),) = found.documents.items()
        assert path.read_text() == text
        assert len(found.errors) > 20 and all("answers 0" in line for line in found.errors)

    @pytest.mark.parametrize("name", ["shapes", "peer_times"])
    def test_shaped_rates_that_ship_are_those_of_its_calls(self, name: str) -> None:
        files = [FILES[name], *([FILES["kernels"]] if name == "shapes" else [])]
        ((path, text),) = fits.fit(name, files, GPUS["H200"]).documents.items()
        assert path.read_text() == text

    def test_terms_without_a_rate_take_what_the_others_leave(self) -> None:
        rng = random.Random(7)
        amounts = [[1.0, rng.uniform(1, 90), rng.uniform(1, 90)] for _ in range(40)]
        times = [5.0 + 0.5 * a + 0.2 * b for _, a, b in amounts]
        assert shaped(amounts, times, [5.0, 0.5, 0.2]) == pytest.approx([5.0, 0.5, 0.2], rel=1e-3)
        found = shaped(amounts, times, [2.0, 0.9, 0.0])
        assert found == pytest.approx([5.0, 0.5, 0.2], rel=0.35)
        assert shaped(amounts[:1], times[:1], [2.0, 0.9, 0.0])[2] < 0.1 * found[2]

    def test_a_peer_that_is_clearly_faster_is_kept(self, tmp_path: Path) -> None:
        rows = refit.rows([FILES["peers"]])
        one = [row for row in rows if row["group"] == "D=128, causal, prompts"]
        for row in one:
            row["us"]["flash3"] = row["us"]["tuner"] / 1.3
        head = {"flash3": "fa3 of today"}
        file = tmp_path / "peers.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in (head, *one)))
        ((_, text),) = peers_fit.refit([file], GPUS["H200"]).documents.items()
        ((domain, (peer,)),) = Portfolio.from_json(json.loads(text)).peers.items()
        assert (domain.label(), peer.build) == ("D=128, causal, prompts", "fa3 of today")
        assert (peer.config["kernel"], len(peer.ratios.logs)) == ("flash3", len(one))

    def test_calls_over_pages_are_of_the_kernel_that_takes_them(self, tmp_path: Path) -> None:
        us = {"tuner": 10.0, "flash3": 5.0, "flash3_unprepared": 6.0}
        problems = [
            AttentionProblem.parse(f"B=8,H={8 * g},HKV=8,SQ=1,SKV=4096,D=128,page_size=16")
            for g in range(2, 10)
        ]
        rows = [{"problem": problem.to_json(), "us": us} for problem in problems]
        head = {"flash3": "fa3 of today", "flash3_serving": "fa3_serving of today"}
        file = tmp_path / "pages.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in (head, *rows)))
        ((_, text),) = peers_fit.refit([file], GPUS["H200"]).documents.items()
        ((domain, (peer,)),) = Portfolio.from_json(json.loads(text)).peers.items()
        assert (domain.label(), peer.build) == (
            "D=128, full, paged, one query",
            head["flash3_serving"],
        )
        assert peer.config["kernel"] == "flash3_unprepared"

    def test_peers_of_unlike_builds_do_not_meet(self, tmp_path: Path) -> None:
        other = tmp_path / "other.jsonl"
        other.write_text('{"flash3": "fa3 of yesterday"}\n')
        with pytest.raises(ConfigError, match="flash3 of fa3 of yesterday, another file fa3 b0"):
            peers_fit.refit([FILES["peers"], other], GPUS["H200"])

    def test_calls_of_another_answer_do_not_count(self) -> None:
        rows = refit.rows([FILES["corrections"]])
        answered = next(row for row in rows if row["answered"] == "selection")
        with pytest.raises(ConfigError, match="no call of these files"):
            corrections_fit.calls([{**answered, "answered": "measured"}], GPUS["H200"])


class TestKernels:
    def rows(
        self, slower: float, more: str = "D=128,causal=1", lengths: str = "S"
    ) -> list[dict[str, Any]]:
        """Calls whose first candidate takes longer than expected by a factor, the others not."""
        portfolio = next(p for p in serving(shipped(), GPUS["H200"]) if p.op == "attention")
        found = []
        for heads, length in ((8, 900), (12, 1500), (16, 2100), (20, 2900), (32, 3300)):
            problem = AttentionProblem.parse(f"H={heads},{lengths}={length},{more},dtype=bf16")
            selection = portfolio.select(problem)
            assert selection is not None
            us = {"tuner": 1.0, "pytorch": 2.0 * selection.vendor_us}
            for _, expected, place, splits in selection.estimates:
                config = selection.times.config(problem, place, splits, selection.facts)
                assert config is not None
                us[config.digest[:6]] = expected * (slower if place == 0 else 1.0)
            found.append({"problem": problem.to_json(), "us": us, "configs": {}, "answered": ""})
        return found

    def test_a_slower_kernel_gets_a_factor(self, tmp_path: Path) -> None:
        path = tmp_path / "kernels.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in ({}, *self.rows(1.3))))
        result = kernels_fit.refit([path], GPUS["H200"])
        factors = sorted(fitted for _, fitted in result.constants.values())
        assert factors == pytest.approx([*[1.0] * (len(factors) - 1), 1.3])
        assert "left out 0.00%" in result.errors[0]
        assert len(kernels_fit.factors([])) == 0
        path.write_text("{}\n" + json.dumps({**self.rows(1.3)[0], "us": {}}) + "\n")
        with pytest.raises(ConfigError, match="times of two kernels"):
            kernels_fit.refit([path], GPUS["H200"])

    def test_a_domain_of_a_donors_rates_gets_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        domain = AttentionDomain(256, "causal", "prompt", has_softcap=True)
        every = tuple(
            replace(one, domains={key: m for key, m in one.domains.items() if key != domain})
            for one in shipped()
        )
        for module in (sys.modules[__name__], kernels_fit):
            monkeypatch.setattr(module, "shipped", lambda: every)
        path = tmp_path / "kernels.jsonl"
        some = self.rows(1.3, "D=256,causal=1,softcap=20")
        path.write_text("".join(json.dumps(line) + "\n" for line in ({}, *some)))
        result = kernels_fit.refit([path], GPUS["H200"])
        (text,) = (text for place, text in result.documents.items() if "attention" in place.name)
        ships = next(p for p in every if p.op == "attention" and p.gpu == GPUS["H200"])
        known = Portfolio.from_json(json.loads(text))
        assert known.domains.keys() == {*ships.domains, domain}
        before, after = ships.models_of(domain), known.models_of(domain)
        assert before is not None and before.donor and after is not None and not after.donor
        pairs = zip(before.candidates, after.candidates, strict=True)
        factors = [fitted.rates["launch"] / old.rates["launch"] for old, fitted in pairs]
        assert 1.3 == pytest.approx(max(factors), rel=1e-3) and min(factors) == pytest.approx(1.0)

    def test_kernels_that_join_where_a_portfolio_is_read_are_chosen_too(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "kernels.jsonl"
        some = self.rows(1.0, "HKV=1,SQ=8,D=192", "SKV")
        path.write_text("".join(json.dumps(line) + "\n" for line in ({}, *some)))
        result = kernels_fit.refit([path], GPUS["H200"])
        assert len(result.errors) == 3
        for line in result.errors:
            assert line.startswith("D=192, full, few queries") and "as it ships 0.00%" in line

    def test_what_ships_is_the_fit_to_its_file(self) -> None:
        found = kernels_fit.refit([FILES["kernels"]], GPUS["H200"])
        titles = {line.split(":")[0] for line in found.errors}
        assert sum(not title.endswith("joined") for title in titles) == 31
        for name, (_, factor) in found.constants.items():
            assert factor == pytest.approx(1.0, abs=0.05), name  # terms have factors of their own

    def test_calls_that_pytorch_answers_have_ratios(self) -> None:
        portfolios = {p.op: p for p in serving(shipped(), GPUS["H200"])}
        calls = ratios_fit.calls(self.rows(1.0), portfolios)
        assert [call.ratio for call in calls] == [
            pytest.approx(2 * call.selection.vendor_us / min(call.selection.estimates)[1])
            for call in calls
        ]
        assert len(calls) == 5
        without = [{**row, "us": {"pytorch": 1.0, "tuner": 1.0}} for row in self.rows(1.0)]
        assert ratios_fit.calls(without, portfolios) == []


RULES = rates_fit.rules(GPUS["H100"])


def products(op: str, step: float, end: float) -> list[rates_fit.TimedProduct]:
    """Times of kernels whose rates are their first guesses, times two factors."""
    rule, _ = RULES[op]
    true = {name: rates_of(config) for name, config in rule.kernels.items()}
    rates = rates_fit.flat({k: Rates(v.step * step, v.end * end) for k, v in true.items()})
    found = []
    for n, k in ((7168, 2048), (4096, 4096), (2112, 7168), (24576, 1536)):
        for m in (128, 1024, 8192):
            scales: Any = "row" if op == rates_fit.OF_ROWS else "block"
            problem: Any = GemmProblem(m, n, k, dtype="float8_e4m3fn", scales=scales)
            if op == GroupedGemmProblem.op:
                problem = GroupedGemmProblem.parse(f"G=64,M={m},N={n},K={k},dtype=e4m3")
            us = {name: rule.expected_us(problem, name, rates) for name in rule.kernels}
            found.append(rates_fit.TimedProduct(problem, us))
    return found


class TestRates:
    @pytest.mark.parametrize("op", RULES)
    def test_rates_are_found_again(self, op: str) -> None:
        (rule, _), timed = RULES[op], products(op, 1.3, 2.0)
        found = rule.fitted(timed)
        errors = [
            abs(rule.expected_us(one.problem, name, found) / us - 1)
            for one in timed
            for name, us in one.us.items()
            if us <= rates_fit.NEAR * min(one.us.values())
        ]
        assert fmean(errors) < 0.03
        assert fmean(rule.loss(one, found) for one in timed) < 0.02

    def test_a_kernel_without_times_moves_as_the_others(self) -> None:
        (rule, _), name = RULES["gemm"], "256x128 u8"
        fewer = [
            one._replace(us={k: v for k, v in one.us.items() if k != name})
            for one in products("gemm", 1.3, 1.3)
        ]
        found = rule.fitted(fewer)[f"{name} step"]
        assert found == pytest.approx(1.3 * rates_of(rule.kernels[name]).step, rel=0.1)

    def test_a_kernel_that_was_left_out_is_expected_to_be_slower(self) -> None:
        (rule, _), name = RULES["gemm"], "256x128 u8"
        *others, last = products("gemm", 1.3, 1.3)
        bounds = [2.0 * one.us[name] for one in others]
        left_out = [
            one._replace(us={k: v for k, v in one.us.items() if k != name}, above={name: bound})
            for one, bound in zip(others, bounds, strict=True)
        ]

        def missing(timed: list[rates_fit.TimedProduct]) -> float:
            rates = rule.fitted(timed)
            expected = (rule.expected_us(one.problem, name, rates) for one in others)
            return fmean(max(0.0, b / us - 1) for b, us in zip(bounds, expected, strict=True))

        assert missing([*left_out, last]) < 0.7 * missing([*others, last])

    def test_what_ships_is_the_fit_to_its_file(self) -> None:
        rows = refit.rows([FILES["rates"]])
        for kind in (GemmProblem.op, rates_fit.OF_ROWS):
            rule, ships = rates_fit.rules(GPUS["H200"])[kind]
            found = rule.fitted(rates_fit.products_of(kind, rows, rule))
            assert {name: round(rate) for name, rate in found.items()} == ships

    def test_kernels_have_names_of_their_own(self) -> None:
        for rule, _ in RULES.values():
            assert len(set(rule.kernels)) == len(set(rule.kernels.values()))


def clear() -> None:
    """Forget what was read of the expectations' file."""
    expectation.shipped.cache_clear()
    expectation.credits.cache_clear()


class TestStopping:
    def test_expectations_are_stored_as_they_ship(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(expectation, "file", lambda: tmp_path / "effort" / "expected.json")
        clear()
        rows = tmp_path / "rows.jsonl"
        searches = [[[30.0, 0.0], [40.0, 0.02]], [[50.0, 0.01], [60.0, 0.0]]]
        lines = [{"group": "gemm", "searches": {"quick 4": ends}} for ends in searches]
        rows.write_text("\n".join(map(json.dumps, [{}, *lines])) + "\n")
        assert cli.main(["fit", "stopping", str(rows), "--write"]) == 0
        assert f"wrote {tmp_path}" in capsys.readouterr().out
        clear()
        (found,) = expectation.shipped()
        clear()
        assert (found.op, found.effort, found.cores, found.recordings) == ("gemm", "quick", 4, 2)
        assert (found.seconds, found.seconds_p90) == (45.0, 60.0)
        assert (found.loss, found.loss_p90) == (0.005, 0.02)

    def test_credits_are_what_came_of_what_was_expected(self) -> None:
        """Each search has a promise after 1, 2 and 9 results; one is below the noise."""
        rows = [[[1, 0.1, 0.02], [2, 0.05, 0.05], [9, 0.0001, 0.0]], [[1, 0.3, 0.02], [9, 0.02, 0]]]
        promises = [[(int(n), expected, came) for n, expected, came in row] for row in rows]
        first, second, last = (stopping_fit._credit(promises, n, n + 1) for n in (1, 2, 9))
        assert first == Credit(1, 0.1, 0.2, 2)
        assert second == Credit(2, 1.0, 1.0, 1)
        assert last == Credit(9, 0.0, 0.0, 1)
        assert stopping_fit._credit(promises, 3, 9) is None

    def test_the_credit_is_that_of_as_many_results(self, monkeypatch: pytest.MonkeyPatch) -> None:
        few, many = Credit(1, 0.5, 0.8, 9), Credit(5, 0.1, 0.2, 9)
        monkeypatch.setattr(expectation, "credits", lambda: (many, few))
        found = [expectation.credit(results) for results in (1, 4, 5, 99)]
        assert found == [few, few, many, many]
        assert expectation.credit(0).share == 1.0

    def test_credits_ship_and_are_below_one(self) -> None:
        """After the first groups far less comes than a surrogate expects."""
        assert [one.results for one in expectation.credits()][:4] == [1, 2, 3, 5]
        assert all(one.searches > 20 for one in expectation.credits())
        assert 0 < expectation.credit(8).share < expectation.credit(1).share < 0.5

    def test_rows_without_searches_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="no simulated search"):
            stopping_fit.refit([FILES["paged"]], DEFAULT_GPU)
