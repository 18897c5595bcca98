"""The report's page: what it holds, that it needs no network, and that its numbers are measured."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tuner import cli
from tuner.base.install import extra_command
from tuner.bench.contenders import Role
from tuner.bench.results import Results, Row, TimedKernel
from tuner.config import Config
from tuner.errors import NoValidConfigError
from tuner.families.softmax import Softmax
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Environment, Measurement, Regime, Status, latency
from tuner.problem import AttentionProblem, SoftmaxProblem
from tuner.report import analysis, charts, course, curves, lengths, page
from tuner.report.heat import heat_panels
from tuner.report.spec import CROSS, Spec
from tuner.report.subject import ReportSubject, from_known
from tuner.runners import recording
from tuner.runners.recording import Recording
from tuner.selection.reader import Entry
from tuner.store import open_store
from tuner.store.entry import is_vendor

MAX_BYTES = 6_000_000
ROOT = Path(__file__).parents[2]
PROBLEM = SoftmaxProblem(256, 512)
REGIME = Regime.default("softmax")
ENVIRONMENT = Environment({"driver": "580"})
SHIPPED = AttentionProblem.parse("S=1024,D=64")
SHIPPED_CUDNN = Config("vendor_sdpa", {"kernel": "cudnn"})
EAGER = Regime("eager", "warm")


def measurement(
    config: Config,
    us: float | None,
    number: int = 0,
    *,
    is_final: bool = False,
    std_us: float = 0.01,
) -> Measurement:
    """One that passed, or timed out where it has no time."""
    return Measurement(
        PROBLEM,
        config,
        DEFAULT_GPU,
        REGIME,
        Status.TIMEOUT if us is None else Status.OK,
        environment=ENVIRONMENT,
        latency_us=us,
        std_us=None if us is None else std_us,
        rounds=20,
        is_final=is_final,
        compile_cpu_s=2.0,
        created_at=f"2026-11-20T10:00:{number:02d}+00:00",
    )


def vendor(kernel: str, us: float, std_us: float = 0.01) -> Measurement:
    config = Config("vendor_softmax", {"kernel": kernel})
    return measurement(config, us, 59, is_final=True, std_us=std_us)


def of(*measurements: Measurement, known: tuple[Entry, ...] = ()) -> ReportSubject:
    recorded = Recording(PROBLEM, DEFAULT_GPU, REGIME, ENVIRONMENT, measurements)
    return ReportSubject(recorded, "recording <b>one</b>", known)


CONFIGS = list(Softmax().space(PROBLEM, DEFAULT_GPU))


def sample() -> ReportSubject:
    """24 candidates; each fourth failed; the fastest, 30.0 us, is the eighth."""
    times = [None if n % 4 == 3 else 50.0 - n for n in range(24)]
    times[7] = 30.0 - 4
    quick = [measurement(c, us, n) for n, (c, us) in enumerate(zip(CONFIGS, times, strict=False))]
    finals = [measurement(CONFIGS[7], 30.0, 50, is_final=True)]
    finals += [measurement(CONFIGS[22], 31.0, 50, is_final=True), vendor("torch", 33.0)]
    return of(*quick, *finals)


class Reader(HTMLParser):
    """Elements and their attributes, and the text of scripts with an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._script = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._script = str(dict(attrs).get("id", "")) if tag == "script" else ""

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[self._script] = data

    def handle_endtag(self, tag: str) -> None:
        self._script = ""

    def json(self, name: str) -> Any:
        return json.loads(self.scripts[name])


@pytest.fixture(scope="module")
def recorded() -> ReportSubject:
    return from_known(SHIPPED, DEFAULT_GPU, Regime.choices("attention"), None)


@pytest.fixture(scope="module")
def text(recorded: ReportSubject) -> str:
    """The page of a shipped recording of some hundred candidates."""
    return page.render(recorded)


@pytest.fixture(scope="module")
def reader(text: str) -> Reader:
    return Reader(text)


class TestPage:
    """The page of a shipped recording."""

    def test_it_is_small(self, text: str) -> None:
        assert len(text.encode()) <= MAX_BYTES

    def test_it_refers_to_nothing_outside(self, reader: Reader) -> None:
        for tag, attributes in reader.elements:
            for name in ("src", "href", "action", "data", "poster", "srcset"):
                value = attributes.get(name)
                assert value is None or value.startswith("#"), (tag, name, value)
            assert tag not in ("link", "iframe", "object", "embed", "img")
        (policy,) = (a["content"] for _, a in reader.elements if "http-equiv" in a)
        # The browser itself refuses what would leave the page.
        assert policy and policy.startswith("default-src 'none'")
        assert "http" not in policy and "unsafe-eval" not in policy
        assert "url(" not in reader.scripts["specs"] and '"url"' not in reader.scripts["specs"]

    def test_each_picture_has_its_place_and_its_words(self, reader: Reader) -> None:
        places = {
            str(a["id"]): a for tag, a in reader.elements if tag == "div" and a.get("role") == "img"
        }
        specs = reader.json("specs")
        assert set(places) == {f"chart-{name}" for name in specs}
        assert all(places[f"chart-{name}"]["aria-label"] for name in specs)
        assert {"ranking", "limits", "progress", "roofline", "memory"} <= set(specs)
        ids = [a["id"] for _, a in reader.elements if "id" in a]
        assert len(ids) == len(set(ids))
        targets = {str(a["href"])[1:] for tag, a in reader.elements if tag == "a"}
        assert targets <= set(ids)

    def test_its_numbers_are_the_measured_ones(
        self, reader: Reader, recorded: ReportSubject
    ) -> None:
        data = reader.json("data")
        assert data["environment"] == dict(recorded.environment.facts)
        every = [m for part in recorded.recording.walk() for m in part.measurements]
        assert [m["latency_us"] for m in data["measurements"]] == [m.latency_us for m in every]
        specs = reader.json("specs")
        bars = [value["us"] for value in specs["ranking"]["data"]["values"]]
        assert bars == [m.latency_us for m in recorded.ranking]
        points = [value["us"] for value in specs["progress"]["data"]["values"]]
        assert points == [m.latency_us for m in recorded.quick if m.ok]

    def test_it_serves_light_and_dark_and_phones(self, text: str, reader: Reader) -> None:
        assert "prefers-color-scheme: dark" in text
        names = {a.get("name") for tag, a in reader.elements if tag == "meta"}
        assert {"viewport", "color-scheme"} <= names
        assert all(spec["width"] == "container" for spec in reader.json("specs").values())

    def test_a_shape_is_broken_behind_its_commas(self, text: str) -> None:
        (title,) = re.findall("<h1>(.*)</h1>", text)
        assert "B=1,\u200bH=16,\u200bS=1024,\u200bD=64" in title

    def test_it_carries_the_library(self, text: str) -> None:
        assert "window.vegaEmbed" in text


def drawn(spec: Spec) -> str:
    """A picture as Vega draws it."""
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg({**spec, "width": 400})
    assert "NaN" not in svg
    return svg


def specs(subject: ReportSubject) -> Iterator[Spec]:
    own = subject.entry.best_own
    assert own is not None
    yield charts.ranking(subject)
    yield charts.progress(course.progress(subject))
    yield charts.busy(subject, own)
    yield charts.memory(subject)
    yield from filter(None, [charts.roofline(subject)])
    for heat in analysis.heat_maps(subject):
        yield from (spec for _, spec in heat_panels(heat))
    yield from map(charts.importance, analysis.importances(subject))


class TestPictures:
    """Each specification is drawn by Vega itself."""

    def test_all_are_drawn(self, recorded: ReportSubject) -> None:
        for spec in [*specs(recorded), *specs(sample())]:
            assert drawn(spec).startswith("<svg")

    def test_what_is_no_picture_is_refused(self) -> None:
        with pytest.raises(ValueError, match="conversion failed"):
            drawn({"data": {"values": []}, "mark": "nothing", "width": 400})

    def test_bars_carry_their_times(self) -> None:
        svg = drawn(charts.ranking(sample()))
        assert all(f">{us} us</text>" in svg for us in ("30.0", "31.0", "33.0"))

    def test_failures_are_shown(self) -> None:
        subject = sample()
        assert CROSS in drawn(charts.progress(course.progress(subject)))
        (heat,) = analysis.heat_maps(subject)
        counted = sum(len(cell.failed) for cell in heat.cells)
        assert counted == sum(not m.ok for m in subject.quick) > 0
        shown = "".join(drawn(spec) for _, spec in heat_panels(heat))
        assert f"{CROSS} 1</text>" in shown or f"{CROSS} 2</text>" in shown

    def test_no_layer_is_empty_where_no_own_kernel_was_a_finalist(
        self, recorded: ReportSubject
    ) -> None:
        """The library warns of an empty one in the browser's console."""
        finals = [m for m in recorded.ranking if is_vendor(m.config)]
        quick = [m for m in recorded.recording.measurements if not m.is_final]
        left = replace(recorded.recording, measurements=(*quick, *finals))
        spec = charts.roofline(replace(recorded, recording=left))
        assert all(layer.get("data", {}).get("values", "all") for layer in spec["layer"])

    def test_a_family_that_failed_throughout(self) -> None:
        finals = (vendor("torch", 33.0), measurement(CONFIGS[0], 30.0, is_final=True))
        subject = of(*(measurement(c, None, n) for n, c in enumerate(CONFIGS[:9])), *finals)
        assert "no own" not in analysis.verdict(subject)
        assert course.stopping(course.progress(subject)) == []
        for heat in analysis.heat_maps(subject):
            for _, spec in heat_panels(heat):
                assert CROSS in drawn(spec)


class TestVerdict:
    """One sentence, true to the final pass."""

    def own(self, us: float, std_us: float = 0.01) -> Measurement:
        return measurement(CONFIGS[0], us, is_final=True, std_us=std_us)

    def test_faster(self) -> None:
        text = analysis.verdict(of(self.own(30.0), vendor("a", 40.0), vendor("b", 50.0)))
        assert text.endswith(" in 30.0 us: 1.33x a (40.0 us, the fastest of 2 vendors' kernels).")

    def test_slower(self) -> None:
        text = analysis.verdict(of(self.own(50.0), vendor("a", 40.0)))
        assert text.startswith("a stays the fastest for softmax M=256,N=512,dtype=fp16 with 40.0")
        assert text.endswith("takes 50.0 us: 0.80x a, slower.")

    def test_a_tie(self) -> None:
        text = analysis.verdict(of(self.own(40.1, 0.5), vendor("a", 40.0, 0.5)))
        assert "in 40.1 us: 1.00x a, a tie (40.0 us, the one vendor's kernel measured)." in text

    def test_alone(self) -> None:
        assert analysis.verdict(of(self.own(40.0))).endswith("no vendor's kernel was measured.")
        assert analysis.verdict(of(vendor("a", 9.0))).startswith("No own kernel passed for softmax")

    def test_before_the_final_pass(self) -> None:
        text = analysis.verdict(of(measurement(CONFIGS[0], 12.0)))
        assert text.startswith("Not decided: ") and text.endswith("with 12.0 us.")

    def test_nothing_passed(self) -> None:
        with pytest.raises(NoValidConfigError, match="no kernel passed for softmax"):
            of(measurement(CONFIGS[0], None))


class TestSearch:
    """The course of the search and what stopping would have lost."""

    def test_the_best_so_far(self) -> None:
        steps = course.progress(sample())
        assert [step.best_us for step in steps[:5]] == [50.0, 49.0, 48.0, 48.0, 46.0]
        assert course.found_at(steps) == 8
        assert [(stop.candidates, stop.best_us) for stop in course.stopping(steps)] == [
            (1, 50.0),
            (2, 49.0),
            (5, 46.0),
            (10, 26.0),
            (20, 26.0),
            (24, 26.0),
        ]
        stops = course.stopping(steps)
        assert stops[0].loss == pytest.approx(50 / 26 - 1) and stops[-1].loss == 0
        assert [stop.compile_cpu_s for stop in stops] == [2.0, 4.0, 10.0, 20.0, 40.0, 48.0]
        assert [stop.worked_s for stop in stops] == [0.0, 1.0, 4.0, 9.0, 19.0, 23.0]

    def test_the_order_is_that_of_time(self) -> None:
        late, early = measurement(CONFIGS[0], 10.0, 30), measurement(CONFIGS[1], 20.0, 5)
        assert [s.measurement for s in course.progress(of(late, early))] == [early, late]

    def test_cost(self) -> None:
        cost = course.cost(sample())
        assert (cost.candidates, cost.compile_cpu_s) == (24, 48.0)
        assert cost.failures == {"timeout": 5}
        assert cost.worked_s == 59.0

    def test_one_change(self) -> None:
        base = CONFIGS[0]
        changes = [c for c in CONFIGS[1:] if len(analysis.differences(base, c)) == 1][:2]
        other = next(c for c in CONFIGS if len(analysis.differences(base, c)) > 1)
        final = measurement(base, 12.0, is_final=True)
        subject = of(
            measurement(base, 10.0),
            measurement(changes[0], 12.0),
            measurement(changes[1], 11.0),
            measurement(other, 10.5),
            final,
        )
        found = analysis.one_change(subject, final)
        assert [round(change.ratio, 3) for change in found] == [1.1, 1.2]
        assert [change.measurement.config for change in found] == [changes[1], changes[0]]

    def test_differences_reach_into_stages(self) -> None:
        one, other = (
            Config("three", {"pdl": True}, {"qk": Config("gemm", {"tile_m": m})}) for m in (64, 128)
        )
        assert analysis.differences(one, other) == {"qk.tile_m": (64, 128)}


def test_importance_finds_the_parameter_that_matters() -> None:
    """Times that follow one parameter alone."""
    quick = [
        measurement(c, 10.0 * c["passes"], n % 60)
        for n, c in enumerate(CONFIGS)
        if c["vector_width"] == CONFIGS[0]["vector_width"]
    ]
    assert len(quick) >= analysis.MIN_CANDIDATES
    (found,) = analysis.importances(of(*quick))
    assert next(iter(found.shares)) == "passes"
    assert found.shares["passes"] > 0.95
    assert sum(found.shares.values()) == pytest.approx(1)
    assert analysis.importances(of(*quick[: analysis.MIN_CANDIDATES - 1])) == []


def tuned_at(*times: tuple[int, float, float]) -> tuple[Entry, ...]:
    """Decisions at (length, own time, cuDNN's time)."""
    base = measurement(CONFIGS[0], 1.0, is_final=True)
    own, cudnn = Config("fused_attention"), Config("vendor_sdpa", {"kernel": "cudnn"})
    found = []
    for seqlen, own_us, vendor_us in times:
        problem = replace(SHIPPED, seqlen_q=seqlen, seqlen_kv=seqlen)
        at = base.but(problem=problem, regime=Regime.default("attention"))
        pair = [at.but(config=own, latency_us=own_us), at.but(config=cudnn, latency_us=vendor_us)]
        found.append(Entry.of(sorted(pair, key=latency)))
    return tuple(found)


class TestScaling:
    """Curves over the sequence length."""

    def subject(self, *times: tuple[int, float, float]) -> ReportSubject:
        known = tuned_at(*times)
        first = known[0].winner
        at = Recording(SHIPPED, DEFAULT_GPU, first.regime, ENVIRONMENT, known[0].ranking)
        # Neither another head dimension nor another mask is on the curve.
        others = [replace(e.winner.problem, is_causal=True) for e in known]  # type: ignore[type-var]
        causal = [Entry.of([known[0].winner.but(problem=p)]) for p in others]
        return ReportSubject(at, "a test", (*known, *causal))

    def test_a_crossing_lies_where_the_curves_meet(self) -> None:
        # own / cuDNN is 1/2 at 512 and 2 at 2048: they meet at 1024.
        found = lengths.scaling(self.subject((256, 1, 3), (512, 10, 20), (2048, 80, 40)))
        assert {(n.seqlen, n.kernel) for n in found} == {
            (s, k) for s in (256, 512, 2048) for k in ("fused_attention", "cudnn")
        }
        ((place, before, after),) = lengths.crossings(found)
        assert (round(place), before, after) == (1024, "fused_attention", "cudnn")
        assert "cudnn from here" in drawn(curves.scaling(found))
        assert drawn(curves.memory_scaling(found))

    def test_each_kind_against_the_vendors(self) -> None:
        found = lengths.scaling(self.subject((256, 1, 3), (512, 10, 20), (2048, 80, 40)))
        assert lengths.fastest_of_kinds(found) == {
            "fused": "3.00x the fastest vendor at 256; 0.50x the fastest vendor at 2048, slower; "
            "as fast near 1024"
        }

    def test_a_bench_comes_before_what_was_tuned(self) -> None:
        """All its lengths are of one run; lengths that it lacks are those that were tuned."""
        tuned = self.subject((256, 1, 3), (512, 10, 20), (2048, 80, 40))

        def timed(role: Role, config: Config, us: float | None) -> TimedKernel:
            status = Status.OK if us else Status.OUT_OF_MEMORY
            return TimedKernel(role, "x", config, status, us, workspace_bytes=10**6)

        unfused, cudnn = Config("three_kernel_attention"), SHIPPED_CUDNN
        row = Row(
            "toy",
            replace(SHIPPED, seqlen_q=512, seqlen_kv=512),
            tuned.regime,
            (
                timed(Role.NAMED, unfused, 30.0),
                timed(Role.PEER, cudnn, 25.0),
                timed(Role.UNTUNED, Config("fused_attention"), None),
            ),
        )
        bench = Results(DEFAULT_GPU, ENVIRONMENT, (row, replace(row, regime=EAGER)))
        found = lengths.scaling(replace(tuned, benches=(bench,)))
        at = {n.kernel: n.measurement.latency_us for n in found if n.seqlen == 512}
        assert at == {"three_kernel_attention": 30.0, "cudnn": 25.0}
        assert {n.seqlen for n in found} == {256, 512, 2048}
        assert lengths.fastest_of_kinds(found)["three kernels"] == (
            "0.83x the fastest vendor at 512, slower; which of the two is faster never changes"
        )
        (one,) = [n for n in found if n.kernel == "three_kernel_attention"]
        assert one.bytes == row.problem.bytes + 10**6
        assert one.tokens_per_s == 512 * 1e6 / 30

    def test_two_lengths_make_no_curve(self) -> None:
        assert lengths.scaling(self.subject((256, 1, 3), (512, 10, 20))) == []

    def test_without_a_crossing(self) -> None:
        found = lengths.scaling(self.subject((256, 1, 3), (512, 10, 20), (1024, 30, 40)))
        assert lengths.crossings(found) == []
        assert "from here" not in drawn(curves.scaling(found))


class TestSources:
    """Where a shape's sweep is found."""

    def test_the_store_comes_first(self, tmp_path: Path) -> None:
        path = tmp_path / "a.sqlite"
        config = Config("vendor_sdpa", {"kernel": "cudnn"})
        regime = Regime.default("attention")
        mine = measurement(config, 5.0, is_final=True).but(problem=SHIPPED, regime=regime)
        with open_store(str(path)) as store:
            store.decide(SHIPPED, DEFAULT_GPU, regime, [mine], "sweep")
        found = from_known(SHIPPED, DEFAULT_GPU, Regime.choices("attention"), str(path))
        assert found.source == f"store {path}"
        assert [m.latency_us for m in found.ranking] == [5.0]
        # A store that lacks the shape leaves it to what ships.
        other = replace(SHIPPED, is_causal=True)
        assert (
            from_known(other, DEFAULT_GPU, Regime.choices("attention"), str(path)).source
            == "the shipped recording"
        )

    def test_what_ships(self, recorded: ReportSubject) -> None:
        assert recorded.source == "the shipped recording"
        assert recorded.has_finals and len(recorded.quick) >= 200

    def test_nothing_was_measured(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["report", "--shape", "S=1000,D=72", "--gpu", "H200"]) == 1
        err = capsys.readouterr().err
        assert "nothing was measured for attention B=1,H=16,S=1000,D=72" in err
        assert "S=1024,D=64" in err

    @pytest.mark.parametrize("command", ["report", "explain"])
    def test_the_nearest_measured_shapes_are_named_and_the_rest_counted(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main([command, "--shape", "S=1000,D=64", "--gpu", "H200"]) == 1
        err = capsys.readouterr().err
        nearest = "(measured for attention, nearest first: B=1,H=16,S=1024,D=64,dtype=fp16; "
        assert nearest in err
        assert re.search(r" and \d+ more\)$", err)
        assert err.count("D=") <= 4
        assert len(err) < 400


class TestCommand:
    """`tuner report`."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / f"one{recording.SUFFIX}"
        recording.write(path, sample().recording)
        return path

    def test_it_writes_the_page(
        self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "report.html"
        assert cli.main(["report", "--recording", str(file), "-o", str(out), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["bytes"] == out.stat().st_size
        assert facts["verdict"] in out.read_text().translate({0xA0: " ", 0x200B: ""}).replace(
            "&#39;", "'"
        )
        assert not list(tmp_path.glob("*.partial"))

    def test_a_job_s_problems_have_a_page_each(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Those that something was measured of; the others are said."""
        file, out = tmp_path / "s.sqlite", tmp_path / "pages"
        missing = SoftmaxProblem(64, 64)
        with open_store(str(file)) as store:
            job = store.jobs.submit([PROBLEM, missing], {})
            empty = store.jobs.submit([missing], {})
            store.add(list(sample().recording.measurements))
        wanted = ["report", "--store", str(file), "--gpu", "H200", "-o", str(out), "--json"]
        assert cli.main([*wanted, "--job", job]) == 1
        said = capsys.readouterr()
        facts = json.loads(said.out)
        (one,) = facts["pages"]
        assert facts["missing"] == [f"softmax {missing.label()}"]
        assert [str(path) for path in out.iterdir()] == [one["path"]]
        assert "softmax" in one["verdict"]
        assert "nothing was measured on NVIDIA H200 for 1 of the 2 problems" in said.err
        assert cli.main([*wanted, "--job", empty]) == 1
        assert cli.main([*wanted, "--job", "nope"]) == 2
        assert "job nope is unknown" in capsys.readouterr().err
        assert cli.main([*wanted, "--job", job, "-o", str(file)]) == 2
        assert "a job's pages go into a folder" in capsys.readouterr().err

    def test_text_is_escaped(self) -> None:
        text = page.render(sample())
        assert "recording <b>one</b>" not in text
        assert "recording &lt;b&gt;one&lt;/b&gt;" in text

    def test_a_missing_folder(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["report", "--recording", str(file), "-o", "no/where.html"]) == 2
        assert "no/where.html: there is no folder" in capsys.readouterr().err

    def test_a_folder(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["report", "--recording", str(file), "-o", str(file.parent)]) == 2
        assert "is a folder; name a file in it" in capsys.readouterr().err

    def test_a_file_that_is_no_recording(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["report", "--recording", "README.md"]) == 2
        assert "recording README.md" in capsys.readouterr().err

    def test_without_the_extra(
        self, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "vl_convert", None)
        assert cli.main(["report", "--recording", str(file)]) == 2
        err = capsys.readouterr().err
        assert "a report needs the extra 'report' (vl_convert)" in err
        assert f"`{extra_command('report')}`" in err


def test_a_wheel_carries_the_template() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["tuner.report"]
    files = (file for file in page.TEMPLATE.parent.iterdir() if file.suffix not in (".py", ""))
    assert all(any(file.match(pattern) for pattern in patterns) for file in files)
    assert "tuner.report" in project["tool"]["setuptools"]["packages"]
