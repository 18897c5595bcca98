"""The service's pages as text: what they show, what they escape, whom they let in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from pages_client import (
    HOSTILE,
    HTML,
    OWN,
    Text,
    client_fixture,
    quick,
    show,
)
from serving import PROBLEM, READ, SHAPE, WRITE, decide, eventually, measured, served_store
from starlette.testclient import TestClient

from tuner.config import Config
from tuner.measurement import Provenance
from tuner.problem import GemmProblem
from tuner.report import assets
from tuner.report.palette import DARK, LIGHT, colours
from tuner.report.spec import CONFIG
from tuner.service.app import create_app
from tuner.service.decisions import DecisionTable
from tuner.service.pages import overview, render, table, trials
from tuner.service.pages.highlight import highlight
from tuner.service.tokens import Tokens
from tuner.store import Entry, Store, open_store
from tuner.store.jobs import result_of

store = served_store
client = client_fixture


PATHS = ("/cache", "/jobs", "/compare", "/trials", "/kernel", "/login", "/static/pages.js")


class TestFrame:
    """What holds of every page."""

    @pytest.mark.parametrize(
        "path", ["/cache", "/jobs", "/compare", f"/trials?shape={SHAPE}", "/nowhere"]
    )
    def test_a_browser_trusts_nothing_but_the_service(self, client: TestClient, path: str) -> None:
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        page = Text(answer.text)
        for tag, attributes in page.tags:
            assert not [name for name in attributes if name == "style" or name.startswith("on")]
            if tag == "script":
                is_data = attributes.get("type") == "application/json"
                assert is_data or str(attributes["src"]).startswith("/static/")
            assert not re.match(r"(https?:)?//", str(attributes.get("href") or ""))

    def test_every_link_leads_to_a_page(self, client: TestClient, store: Store) -> None:
        store.add([quick(1, 12.0), quick(2, None, log=HOSTILE)])
        store.jobs.submit([PROBLEM], {"effort": "quick"})
        open_links, seen = ["/"], set()
        while open_links:
            link = open_links.pop()
            if link in seen or link.startswith("#") or len(seen) > 150:
                continue
            seen.add(link)
            answer = client.get(link)
            assert answer.status_code == 200, link
            if answer.headers["content-type"].startswith("text/html"):
                open_links += Text(answer.text).links
        kinds = {link.partition("?")[0].split("/")[1] for link in seen}
        assert kinds >= {"", "cache", "jobs", "compare", "trials", "kernel", "openapi.json"}

    def test_programs_are_told_errors_as_before(self, client: TestClient) -> None:
        assert client.get("/v1/jobs/x").json().keys() == {"error"}
        assert client.get("/nowhere", headers={"accept": "*/*"}).json().keys() == {"error"}

    def test_every_shape_has_its_page(self, client: TestClient, store: Store) -> None:
        problem = replace(PROBLEM, window_left=128, softcap=1e6)
        decide(store, measured(problem=problem))
        assert "softcap=1e+06" in show(client, render.trials_url(problem)).said

    def test_errors_are_pages(self, client: TestClient) -> None:
        assert "job 000000000000 is unknown" in show(client, f"/jobs/{'0' * 12}", 404).said
        assert "D=7 has no tuned kernel" in show(client, "/trials", 422, shape="S=64,D=7").said
        assert "query.config" in show(client, "/kernel", 422, shape=SHAPE, config="../etc").said
        missing = {"shape": SHAPE, "config": "0" * 16}
        assert "nothing was measured of" in show(client, "/kernel", 404, **missing).said
        assert "there is no run" in show(client, "/trials", 404, shape=SHAPE, run="0" * 12).said

    @pytest.mark.parametrize("name", ["pages.css", "pages.js", "figures.js", "vega.js"])
    def test_what_they_are_drawn_with_comes_from_here(self, client: TestClient, name: str) -> None:
        answer = client.get(f"/static/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-encoding"] == "gzip"
        plain = client.get(f"/static/{name}", headers={"accept-encoding": "identity"})
        assert plain.text == answer.text
        again = client.get(f"/static/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")

    def test_their_colours_are_the_report_s(self, client: TestClient) -> None:
        sheet = client.get("/static/pages.css").text
        assert sheet.startswith(colours())
        own = {"state-done", "state-running", "state-idle"}
        assert set(re.findall(r"var\(--([a-z0-9-]+)\)", sheet)) <= set(LIGHT) | own

    def test_their_pictures_are_configured_as_the_report_s(self, client: TestClient) -> None:
        first = client.get("/static/figures.js").text.partition("\n")[0]
        config = first.removeprefix("const config = ").removesuffix(";")
        assert json.loads(config) == CONFIG

    def test_no_other_file_is_served(self, client: TestClient) -> None:
        for name in ("routes.py", "..%2froutes.py", "base.html.j2", "%2fetc%2fpasswd", ""):
            assert client.get(f"/static/{name}").status_code == 404

    def test_without_the_script_of_pictures_that_is_said(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def missing() -> str:
            raise render_error

        from tuner.errors import ConfigError
        from tuner.service.pages import routes

        render_error = ConfigError("pictures need vl-convert-python")
        monkeypatch.setattr(assets, "library", missing)
        routes._static.cache_clear()
        assert client.get("/static/vega.js").status_code == 422
        routes._static.cache_clear()

    @settings(max_examples=60)
    @given(
        path=st.sampled_from(PATHS),
        query=st.dictionaries(
            st.sampled_from(
                "shape op gpu regime l2 run sweep job config q order first a b next".split()
            ),
            st.one_of(st.text(max_size=40), st.sampled_from([SHAPE, "attention", "H200", "1"])),
        ),
    )
    def test_no_query_breaks_a_page(self, path: str, query: dict[str, str]) -> None:
        assert self.asked.get(path, params=query, headers=HTML).status_code < 500

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def one_client(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with open_store(str(tmp_path_factory.mktemp("drawn") / "s.sqlite")) as made:
            app = create_app(made, Tokens(READ, WRITE))
            with TestClient(app, base_url="http://tuner", raise_server_exceptions=False) as asked:
                asked.headers["authorization"] = f"Bearer {READ}"
                cls.asked = asked
                yield


class TestCache:
    def test_it_shows_what_serves_each_problem(self, client: TestClient) -> None:
        page = show(client, "/cache", q=SHAPE)
        assert "B=1,H=16,S=640,D=64,dtype=fp16 H200, stream-warm cudnn 12.0" in page.said
        assert any(link.startswith("/trials?") and "640" in link for link in page.links)

    def test_words_narrow_it(self, client: TestClient) -> None:
        assert (
            "1 to 1 of 1 decisions that match" in show(client, "/cache", q="cudnn s=640 H200").said
        )
        nothing = show(client, "/cache", q=f"nonsense {HOSTILE}")
        assert "0 decisions that match" in nothing.said
        assert ("script", {}) not in nothing.tags

    @pytest.mark.parametrize("order", ["problem", "us", "-tflops", "-speed", "-decided"])
    def test_orders(self, store: Store, order: Any) -> None:
        found = table.find_entries(DecisionTable.read(store), "", order=order).entries
        keys = {
            "problem": lambda e: 0,
            "us": lambda e: e.winner.latency_us,
            "-tflops": lambda e: -e.winner.tflops,
            "-speed": lambda e: -min(e.speedups.values(), default=0.0),
            "-decided": lambda e: [-ord(c) for c in e.decided_at],
        }[order]
        assert len(found) > 10
        assert [keys(e) for e in found] == sorted(keys(e) for e in found)

    def test_it_is_cut_into_parts(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(table, "ROWS", 3)
        page = show(client, "/cache", q="attention", first=3)
        assert "4 to 6 of" in page.said
        assert "/cache?q=attention&order=problem" in page.links

    def test_a_new_decision_is_shown(self, client: TestClient, store: Store) -> None:
        decide(store, measured(9.25))
        eventually(lambda: "9.25" in show(client, "/cache", q=SHAPE).said)


class TestJobs:
    def test_none(self, client: TestClient) -> None:
        assert "No jobs." in show(client, "/jobs").said

    def test_jobs_and_one_of_them(self, client: TestClient, store: Store) -> None:
        other = GemmProblem(128, 128, 64)
        options = {"effort": "full", "trials": 9, "families": ["gemm"], "seed": 0}
        id = store.jobs.submit([PROBLEM, other], options, priority=4)
        claim = store.jobs.claim("host:1")
        assert claim is not None
        told = {"phase": "search", "done": 3, "goal": 12, "best_own_us": 11.25}
        store.jobs.extend(claim.lease, told)
        assert "1 queued, 1 running" in show(client, "/jobs").said
        page = show(client, f"/jobs/{id}")
        assert "options effort full, families gemm, seed 0, trials 9" in page.said
        assert "search 3/12 on host:1" in page.said
        assert "11.2" in page.said
        assert ("body", {"data-events": f"/v1/jobs/{id}/events"}) in page.tags
        assert page.said.index("S=640") < page.said.index("M=128")
        assert "S=640" not in show(client, f"/jobs/{id}", state="queued").said
        store.jobs.fail(claim.lease, HOSTILE, is_final=True)
        failed = show(client, f"/jobs/{id}", state="failed")
        assert HOSTILE in failed.said
        assert ("script", {}) not in failed.tags
        show(client, f"/jobs/{id}", 422, state="odd")

    def test_a_finished_problem_shows_its_result(self, client: TestClient, store: Store) -> None:
        id = store.jobs.submit([PROBLEM, GemmProblem(128, 128, 64)], {})
        for kind, us in ((Provenance.MEASURED, 9.0), (Provenance.REPLAYED, 15.0)):
            claim = store.jobs.claim("host:1")
            assert claim is not None
            ranking = [measured(us, config=OWN, provenance=kind), measured(provenance=kind)]
            ranking = [m.but(is_final=kind is Provenance.MEASURED) for m in ranking]
            store.jobs.finish(claim.lease, "decided", result_of(Entry.of(ranking)))
        page = show(client, f"/jobs/{id}")
        digest = OWN.digest[:6]
        assert f"softmax {digest} 9.00 1.33x cudnn" in page.said
        assert f"softmax {digest}, replayed, quick pass 15.0 0.80x cudnn, slower" in page.said
        assert [link for link in page.links if link.startswith("/kernel") and OWN.digest in link]


class TestOverview:
    """The landing page."""

    def test_wins_ties_and_losses_are_counted_apart(self) -> None:
        def decided(number: int, own: float, vendor: float, noise: float = 0.01) -> Entry:
            problem = replace(PROBLEM, batch=number)
            times = [measured(own, problem, config=OWN), measured(vendor, problem)]
            return Entry.of([m.but(std_us=noise) for m in times])

        entries = [
            decided(1, 10.0, 12.0),
            decided(2, 10.0, 9.0),
            decided(3, 10.0, 7.0),
            decided(4, 10.05, 10.0, noise=0.1),
            Entry.of([measured(10.0, replace(PROBLEM, batch=5), config=OWN)]),
        ]
        found = overview.overview(entries)
        counts = {name: found.count(name) for name in ("ahead", "tied", "behind", "alone")}
        assert counts == {"ahead": 1, "tied": 1, "behind": 2, "alone": 1}
        assert [entry.problem.batch for entry in found.losses] == [3, 2], "the largest first"
        (part,) = found.parts
        assert part.mean == "0.93x, slower"
        assert part.bar == {"done": 1, "cancelled": 1, "failed": 2}

    def test_only_measured_times_count(self) -> None:
        predicted = measured(provenance=Provenance.PREDICTED)
        assert overview.overview([Entry.of([predicted])]).total == 0

    def test_it_leads_to_what_it_counts(self, client: TestClient) -> None:
        page = show(client, "/")
        assert "are behind in" in page.said
        link = next(link for link in page.links if "standing=behind" in link)
        listed = show(client, link)
        speeds = re.findall(r"0\.\d\dx \w+, slower", listed.said)
        assert speeds
        assert ", a tie" not in listed.said

    def test_who_works_on_what(self, client: TestClient, store: Store) -> None:
        assert "No worker is busy" in show(client, "/").said
        id = store.jobs.submit([PROBLEM], {})
        claim = store.jobs.claim("host:7")
        store.jobs.extend(claim.lease, {"phase": "search", "done": 3, "goal": 12})
        page = show(client, "/")
        assert "host:7 attention B=1,H=16,S=640,D=64,dtype=fp16" in page.said
        assert "search 3/12" in page.said
        assert f"/jobs/{id}" in page.links


class TestFilters:
    """Lists that show a part."""

    def test_decisions(self, client: TestClient) -> None:
        page = show(client, "/cache", op="gemm", standing="behind")
        rows = [text for tag, text in page.tags if tag == "th" and text.get("scope") == "row"]
        assert 0 < len(rows) < 50
        assert "that match, of" in page.said
        assert all("op=gemm" in link for link in page.links if link.startswith("/cache?"))
        assert client.get("/cache", params={"standing": "winning"}).status_code == 422
        assert client.get("/cache", params={"op": "conv"}).status_code == 422

    def test_jobs_by_state(self, client: TestClient, store: Store) -> None:
        kept, ended = (store.jobs.submit([PROBLEM], {}) for _ in range(2))
        store.jobs.cancel(ended)
        page = show(client, "/jobs", state="cancelled")
        assert f"/jobs/{ended}" in page.links
        assert f"/jobs/{kept}" not in page.links
        assert "No job is failed." in show(client, "/jobs", state="failed").said

    def test_trials_in_pages_and_by_pass(self, client: TestClient, store: Store) -> None:
        count = trials.ROWS + 30
        store.add(
            [quick(n % 60, 20.0 + n, config=Config("softmax", {"n": n})) for n in range(count)]
        )
        store.add([quick(n, None, config=Config("softmax", {"f": n})) for n in range(2)])
        query = {"shape": SHAPE, "sweep": "s"}
        page = show(client, "/trials", **query)
        assert f"1 to {trials.ROWS} of {count + 2} measurements" in page.said
        (following,) = (link for link in page.links if "first=" in link)
        assert f"{trials.ROWS + 1} to {count + 2} of" in show(client, following).said
        failed = show(client, "/trials", **query, show="failed")
        assert "1 to 2 of 2 measurements (failed)" in failed.said
        assert "0 measurements (final)" in show(client, "/trials", **query, show="final").said


class TestHighlighting:
    @given(st.text(alphabet=st.sampled_from("ab0_\"'#/*\n <&\\"), max_size=60))
    def test_every_character_is_kept(self, text: str) -> None:
        for language in ("cuda", "python"):
            made = highlight(text, language)  # type: ignore[arg-type]
            assert Text(f"<pre>x{made}</pre>").words == f"x{text}"
            assert set(re.findall(r"<[^>]*>", made)) <= TAGS

    def test_kinds(self) -> None:
        made = highlight('#include <a.h>\nfor (int i = 0x1f; ; ) f("for"); // for\n', "cuda")
        assert re.findall(r'tok-(\w+)">([^<]*)<', made) == [
            ("directive", "#include"),
            ("directive", "&lt;a.h&gt;\n"),
            ("keyword", "for"),
            ("keyword", "int"),
            ("number", "0x1f"),
            ("string", "&quot;for&quot;"),
            ("comment", "// for\n"),
        ]


TAGS = {
    f'<span class="tok-{kind}">' for kind in ("comment", "directive", "string", "number", "keyword")
} | {"</span>"}


def test_the_pages_are_carried_by_the_wheel() -> None:
    import tomllib

    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["tuner.service.pages"]
    files = [f for f in render.FOLDER.iterdir() if f.is_file() and f.suffix != ".py"]
    assert len(files) > 8
    assert all(any(file.match(pattern) for pattern in patterns) for file in files)


def luminance(colour: str) -> float:
    """Of WCAG 2: relative luminance of ``#rrggbb``."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_words_can_be_read(colours: Mapping[str, str]) -> None:
    """Contrast of every colour of text with both backgrounds: at least WCAG's 4.5."""
    for name in ("ink", "soft", "link", "failed", "done-ink"):
        for ground in ("paper", "panel"):
            low, high = sorted((luminance(colours[name]), luminance(colours[ground])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, f"{name} on {ground}"
