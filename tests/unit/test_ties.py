"""Equal times within their noise: every face calls them a tie, none a win or a loss."""

from __future__ import annotations

import pytest
from stored import final

from tuner.cli.result import outcome_text
from tuner.config import Config
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Environment, Measurement, Provenance, Regime, versus
from tuner.problem import AttentionProblem
from tuner.search.ranking import rank
from tuner.selection.describe import against_fastest, answer_text, list_text, speedups_text
from tuner.selection.reader import LookupResult
from tuner.store.entry import Entry
from tuner.store.jobs import result_of, result_speed, result_text
from tuner.tuning.outcome import Outcome

PROBLEM = AttentionProblem.parse("S=1024,D=64")
OWN = Config("fused_attention", {"tile_n": 128})
CUDNN, FLASH = (Config("vendor_sdpa", {"kernel": name}) for name in ("cudnn", "flash4"))


def measured(config: Config, us: float) -> Measurement:
    return final(config, us, PROBLEM)


def entry(own: float, cudnn: float, flash: float = 15.0) -> Entry:
    times = {OWN: own, CUDNN: cudnn, FLASH: flash}
    return Entry.of(rank([measured(config, us) for config, us in times.items()]))


def roles(decided: Entry) -> dict[str, str]:
    """The table of a sweep: role by kernel."""
    outcome = Outcome(
        PROBLEM, DEFAULT_GPU, Regime(), Environment({}), Provenance.MEASURED, "s",
        decided.ranking, candidates=1, kernels=1, resumed=0, failures={}, unavailable={},
        interrupted=False, elapsed_s=1.0,
    )  # fmt: skip
    lines = outcome_text(outcome, "a store").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("role"))
    rows = [line.split("  ") for line in lines[start + 2 : start + 5]]
    return {next(part for part in row[1:] if part).split()[0]: row[0] for row in rows}


TIED = entry(10.05, 10.0)


def test_a_sweep_names_no_winner_of_a_tie() -> None:
    assert roles(TIED) == {
        "fused_attention": "tied first, best own",
        "cudnn": "tied first, baseline",
        "flash4": "baseline",
    }


@pytest.mark.parametrize(
    ("decided", "first"), [(entry(9.0, 10.0), "fused_attention"), (entry(11.0, 10.0), "cudnn")]
)
def test_a_sweep_names_the_winner_where_there_is_one(decided: Entry, first: str) -> None:
    found = roles(decided)
    assert found[first].startswith("winner, ")
    assert not any("tied" in role for role in found.values())


def test_ratios() -> None:
    own, slower = measured(OWN, 10.05), measured(OWN, 10.3)
    vendor = measured(CUDNN, 10.0)
    assert versus(own, vendor, "cudnn") == "1.00x cudnn, a tie"
    assert versus(slower, vendor, "cudnn") == "0.97x cudnn, slower"
    assert versus(vendor, slower, "own") == "1.03x own"
    assert versus(own, vendor.but(is_final=False)) == "", "of two passes"


def test_lookup_and_list() -> None:
    assert speedups_text(TIED) == "1.00x cudnn, a tie; 1.49x flash4"
    assert against_fastest(TIED) == "1.00x cudnn, a tie"
    text = answer_text(LookupResult(TIED, exact=True), PROBLEM, "a store")
    assert "\ntied first   fused_attention" in text
    assert "winner" not in text
    heading = list_text([TIED]).splitlines()[1].split()
    assert heading == ["shape", "serves", "us", "own", "speed"], "who serves need not have won"


def test_results_of_jobs() -> None:
    result = result_of(TIED)
    assert result["is_tie"] is True
    assert result_text(result).endswith("own speed 1.00x cudnn, a tie")
    del result["is_tie"]  # of an earlier version
    assert result_speed(result) == "1.00x cudnn"
