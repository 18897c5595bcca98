"""The report's pictures as files, what a profile adds to it, and all tuned problems."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from stored import final

from tuner import cli
from tuner.config import Config
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.measure import profile
from tuner.measure.profile import Profile
from tuner.measurement import Environment, Measurement, Regime
from tuner.problem import AttentionProblem
from tuner.report import analysis, charts, curves, lengths, page, pictures, spec
from tuner.report.explain import COUNTED, explain
from tuner.report.lengths import Length
from tuner.report.palette import DARK, LIGHT, colours
from tuner.report.sections import sections
from tuner.report.subject import ReportSubject
from tuner.runners.recording import Recording
from tuner.store import Entry

ASSET = Path(__file__).parents[1] / "assets" / "ncu_attention.csv"
STANDING = "standing"
REGIME = Regime.default("attention")
SHORT, LONG, OTHER = (AttentionProblem.parse(f"S={n},D=64") for n in (1024, 2048, 512))
OWN = Config("fused_attention", {"tile_n": 128})
CUDNN, FLASH = (Config("vendor_sdpa", {"kernel": name}) for name in ("cudnn", "flash4"))


def measured(problem: AttentionProblem, config: Config, us: float) -> Measurement:
    return final(config, us, problem, environment=Environment({"driver": "580"}), std_us=0.01)


def entry(problem: AttentionProblem, own: float, cudnn: float, flash: float) -> Entry:
    times = {OWN: own, CUDNN: cudnn, FLASH: flash}
    ranking = [measured(problem, config, us) for config, us in times.items()]
    return Entry.of(sorted(ranking, key=lambda m: m.latency_us or 0))


@pytest.fixture
def subject() -> ReportSubject:
    known = (entry(LONG, 40, 38, 50), entry(SHORT, 99, 99, 99), entry(OTHER, 5, 9, 10))
    ranking = entry(SHORT, 10, 15, 12).ranking
    recorded = Recording(SHORT, DEFAULT_GPU, REGIME, Environment({"driver": "580"}), ranking)
    return ReportSubject(recorded, "a test", known)


def counted(config: Config = OWN) -> Profile:
    kernels = profile.read_csv(ASSET.read_text())
    environment = Environment({"ncu": "2025.3"})
    return Profile(SHORT, DEFAULT_GPU, REGIME, config, environment, kernels, "2026-11-21T12:00")


class TestStanding:
    def test_each_problem_by_its_own_fastest_vendor_slowest_first(
        self, subject: ReportSubject
    ) -> None:
        """The subject's own measurements stand for what its store decided before."""
        found = analysis.standing(subject)
        assert [s.own.problem for s in found] == [LONG, SHORT, OTHER]
        assert [round(s.ratio, 3) for s in found] == [0.95, 1.2, 1.8]
        assert [s.vendor.config for s in found] == [CUDNN, FLASH, CUDNN]

    def test_other_gpus_and_regimes_are_no_part(self, subject: ReportSubject) -> None:
        foreign = entry(OTHER, 1, 2, 3)
        moved = replace(
            foreign,
            ranking=tuple(m.but(gpu=GPUS["H100"]) for m in foreign.ranking),
        )
        eager = replace(
            foreign, ranking=tuple(m.but(regime=Regime("eager", "warm")) for m in foreign.ranking)
        )
        assert len(analysis.standing(replace(subject, known=(moved, eager)))) == 1

    def test_the_page_says_it(self, subject: ReportSubject) -> None:
        (section,) = (s for s in page.sections(subject) if s.name == "standing")
        assert "own kernels are ahead in 2, tie in 0 and are behind in 1" in section.words[0]
        assert section.table is not None
        assert [row[-1] for row in section.table.rows] == [
            "0.95x cudnn, slower",
            "1.20x flash4",
            "1.80x cudnn",
        ]
        svg = pictures.svg(section.figures[0].spec)
        for text in ("1.80x cudnn", "1.20x flash4", "0.95x cudnn, slower", "\u25b8 S=1024"):
            assert text in svg, "what all share stands at the axis, not in each label"
        assert "undefined" not in svg

    def test_a_tie_is_neither_a_win_nor_a_loss(self, subject: ReportSubject) -> None:
        tied = entry(OTHER, 9.99, 10, 12)
        noisy = tuple(m.but(std_us=0.05) for m in tied.ranking)
        known = (replace(tied, ranking=noisy, best_own=noisy[0], vendors={"cudnn": noisy[1]}),)
        known += subject.known[:2]
        (section,) = (s for s in page.sections(replace(subject, known=known)) if s.name == STANDING)
        assert "ahead in 1, tie in 1 and are behind in 1" in section.words[0]
        values = section.figures[0].spec["data"]["values"]
        assert [value["who"] for value in values] == ["vendor is faster", "a tie", "own is faster"]
        assert values[1]["text"] == "1.00x cudnn, a tie"

    def test_names_stand_whole_above_their_bars(self, subject: ReportSubject) -> None:
        """No label of an axis can be cut, and none takes the bars' width."""
        wide = replace(OTHER, window_left=256, window_right=256, softcap=30.0, heads_kv=1)
        many = replace(subject, known=(*subject.known, entry(wide, 5, 6, 7)))
        for name in (STANDING, "peers", "memory"):
            (section,) = (s for s in page.sections(many) if s.name == name)
            made = section.figures[0].spec
            written = [layer["data"]["values"] for layer in made["layer"] if "data" in layer]
            lines = [row["lines"] for rows in written for row in rows if "lines" in row]
            field = next(iter(made["data"]["values"][0]))
            names = {str(value[field]) for value in made["data"]["values"]}
            assert {"".join(texts) for texts in lines} == names
            assert max(len(line) for texts in lines for line in texts) <= spec.MAX_LINE
            bars = [layer["encoding"]["y"] for layer in made["layer"] if "y" in layer["encoding"]]
            assert all(y["axis"] is None for y in bars)

    def test_alone_there_is_nothing_to_compare(self, subject: ReportSubject) -> None:
        names = [s.name for s in page.sections(replace(subject, known=()))]
        assert "standing" not in names


def test_too_few_lengths_are_said_with_what_adds_some(subject: ReportSubject) -> None:
    two = replace(subject, known=subject.known[:2])
    (section,) = (s for s in page.sections(two) if s.name == "scaling")
    assert "it takes 3 problems, tuned or benched" in section.words[0]
    assert "(known: 1024, 2048)" in section.words[0]
    assert not section.figures
    (section,) = (s for s in page.sections(subject) if s.name == "scaling")
    assert [figure.name for figure in section.figures] == ["scaling", "memory-scaling"]


class TestLengths:
    """The pictures over the sequence length."""

    def lengths(self, kernels: int, seqlens: tuple[int, ...] = (512, 1024, 2048)) -> list[Length]:
        """The first kernel is the fastest up to 1024, the last one beyond; all others between."""
        found = []
        for seqlen in seqlens:
            problem = replace(OTHER, seqlen_q=seqlen, seqlen_kv=seqlen)
            for number in range(kernels):
                name = f"vendor{number}" if number else "fused_attention"
                place = number if seqlen <= 1024 else -number
                m = measured(problem, OWN, 20.0 + place)
                found.append(Length(seqlen, name, number > 0, m))
        return found

    def test_six_series_at_most_and_no_colour_twice(self) -> None:
        found = self.lengths(11)
        names = lengths.drawn(found)
        assert len(names) == lengths.MAX_SERIES
        assert {"fused_attention", "vendor10", "vendor1"} <= {*names}, "who is the fastest is there"
        assert names[0] == "fused_attention"
        shown = [length for length in found if length.kernel in names]
        for made in (curves.scaling(shown), curves.memory_scaling(shown)):
            scale = made["layer"][1]["encoding"]["color"]["scale"]
            assert {*scale["domain"]} == {*names}
            assert len({*scale["range"]}) == len(names)

    def test_more_series_than_colours_are_refused(self) -> None:
        with pytest.raises(ValueError, match="9 series"):
            spec.series_of([str(number) for number in range(9)])

    def test_the_best_of_each_kind_goes_before_vendors(self) -> None:
        found = self.lengths(11)
        for family in ("two_kernel_attention", "three_kernel_attention"):
            for length in self.lengths(1):
                slow = length.measurement.but(latency_us=90.0)
                found.append(replace(length, kernel=family, measurement=slow))
        names = lengths.drawn(found)
        assert {"two_kernel_attention", "three_kernel_attention"} <= {*names}

    def test_the_axis_keeps_the_label_of_every_length(self) -> None:
        seqlens = tuple(2**n for n in range(7, 17))
        axis = curves.scaling(self.lengths(2, seqlens))["layer"][0]["encoding"]["x"]["axis"]
        assert axis["values"] == list(seqlens)
        assert axis["labelOverlap"] is False
        svg = pictures.svg(curves.scaling(self.lengths(2, (1000, 1024, 2048))))
        assert ">2k<" in svg and ">1000<" in svg
        assert ">1k<" not in svg, "it would stand on the label beside it"


class TestCounters:
    def test_nothing_is_said_where_nothing_was_counted(self, subject: ReportSubject) -> None:
        account = explain(subject)
        assert account is not None and account.counted == ()
        assert "counted" not in [s.name for s in page.sections(subject)]
        assert page.data(subject)["counted"] is None

    def test_the_account_names_what_was_counted(self, subject: ReportSubject) -> None:
        profile.keep(counted())
        account = explain(subject)
        assert {claim.source for claim in account.counted} == {COUNTED}
        busy, active, waits = (claim.text for claim in account.counted)
        assert "tensor cores 37 %, special-function units 38 %" in busy
        assert "active in 84 % of the 25.8 k cycles" in active
        assert waits.endswith("arithmetic pipe busy 0.06.")

    def test_another_config_s_counters_are_not_this_one_s(self, subject: ReportSubject) -> None:
        profile.keep(counted(CUDNN))
        account = explain(subject)
        assert account is not None and account.counted == ()

    def test_the_page_shows_them(self, subject: ReportSubject) -> None:
        profile.keep(counted())
        (section,) = (s for s in page.sections(subject) if s.name == "counted")
        assert "Nsight Compute 2025.3" in section.words[0]
        assert [figure.name for figure in section.figures] == ["counters", "stalls"]
        assert section.table is not None
        rows = {row[1]: row[2:4] for row in section.table.rows}
        assert rows["tensor cores"] == ("36.65", "%")
        assert rows["duration"] == ("14,560", "ns")
        assert page.data(subject)["counted"] == counted().to_json()

    def test_their_pictures_are_drawn(self) -> None:
        (kernel,) = profile.read_csv(ASSET.read_text())
        shares, stalls = (pictures.svg(f(kernel)) for f in (charts.counted_shares, charts.stalls))
        assert ">37 %</text>" in shares and "special-function units" in shares
        assert ">0.06</text>" in stalls


class TestFiles:
    def test_light_and_dark_in_one(self, subject: ReportSubject) -> None:
        for made in pictures.specs(sections(subject)).values():
            svg = pictures.svg(made)
            root = ElementTree.fromstring(svg)
            assert root.get("aria-label") == made["description"]
            used = set(re.findall(r"var\(--([a-z0-9-]+)\)", svg))
            assert used and used <= set(LIGHT)
            style = root[0].text or ""
            assert style == colours(used)
            assert "prefers-color-scheme: dark" in style
            assert DARK["ink"] in style and LIGHT["ink"] in style
            assert "http://" not in svg.replace("http://www.w3.org/", "")

    def test_one_palette_for_both(self) -> None:
        assert set(LIGHT) == set(DARK)
        assert set(re.findall(r"--([a-z0-9-]+):", colours())) == set(LIGHT)

    def test_the_command(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["report", "--shape", "S=512,D=64", "--gpu", "H200"]
        out = tmp_path / "new" / "pictures"
        only = ["--only", "standing,ranking"]
        assert cli.main([*arguments, "--pictures", str(out), *only, "--json"]) == 0
        written = json.loads(capsys.readouterr().out)["paths"]
        assert [Path(path).name for path in written] == ["standing.svg", "ranking.svg"]
        assert sorted(path.name for path in out.iterdir()) == ["ranking.svg", "standing.svg"]
        assert cli.main([*arguments, "--pictures", str(out), "--only", "nothing"]) == 2
        assert "no picture 'nothing' (allowed: ranking," in capsys.readouterr().err
        assert cli.main([*arguments, *only]) == 2
        assert "--only chooses among --pictures DIR" in capsys.readouterr().err
