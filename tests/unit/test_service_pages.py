"""The service's pages as text: what they show, what they escape, whom they let in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from serving import LOCAL, PROBLEM, READ, SHAPE, WRITE, decide, eventually, measured, served_store
from starlette.testclient import TestClient

from tuner.config import Config
from tuner.hardware import GPUS
from tuner.measurement import Environment, Measurement, Provenance, Regime, Resources, Status
from tuner.problem import AttentionProblem, GemmProblem
from tuner.report import assets
from tuner.report.palette import DARK, LIGHT, colours
from tuner.report.spec import CONFIG
from tuner.service.app import create_app
from tuner.service.pages import environments, overview, render, table, trials
from tuner.service.pages.highlight import highlight
from tuner.service.pages.routes import MAX_LOGINS
from tuner.service.served import Table
from tuner.service.tokens import COOKIE, LIFETIME_S, MAX_SESSIONS, Sessions, Tokens
from tuner.store import Entry, Store, open_store
from tuner.store.jobs import result_of

HTML = {"accept": "text/html"}
OWN = Config("softmax", {"rows_per_block": 1})
HOSTILE = "<script>alert('x')</script> & \"quoted\""
PATHS = ("/cache", "/jobs", "/compare", "/trials", "/kernel", "/login", "/static/pages.js")

store = served_store


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    made = TestClient(create_app(store, Tokens()), base_url=LOCAL, headers=HTML)
    with made:
        yield made


@pytest.fixture
def guarded(store: Store) -> Iterator[TestClient]:
    app = create_app(store, Tokens(READ, WRITE))
    with TestClient(app, base_url="http://tuner", headers=HTML, follow_redirects=False) as made:
        yield made


class Text(HTMLParser):
    """What a reader sees, and what the tags say."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.links, self.tags = "", [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag in ("td", "th", "dd"):
            self.words += " "
        if tag == "a":
            self.links.append(dict(attributes)["href"])

    def handle_data(self, data: str) -> None:
        self.words += data

    @property
    def said(self) -> str:
        return " ".join(self.words.replace("\u200b", "").replace("\u00a0", " ").split())


def show(client: TestClient, path: str, status: int = 200, **query: Any) -> Text:
    answer = client.get(path, params=query or None)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return Text(answer.text)


def quick(number: int, us: float | None, **changes: Any) -> Measurement:
    failed = {} if us else {"status": Status.COMPILE_ERROR, "std_us": None}
    made = {
        "config": Config("softmax", {"rows_per_block": number}),
        "is_final": False,
        "sweep": "s",
        "created_at": f"2026-11-21T10:00:{number:02}.000+00:00",
    }
    return measured(us, **{**made, **failed, **changes})  # type: ignore[arg-type]


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
        assert "there is no job 000000000000" in show(client, f"/jobs/{'0' * 12}", 404).said
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


class TestLogin:
    """Where tokens are asked for, a browser logs in once."""

    def log_in(self, client: TestClient, token: str, next: str = "/cache") -> Any:
        return client.post("/login", data={"token": token, "next": next})

    def test_a_page_leads_to_the_login_and_back(self, guarded: TestClient) -> None:
        answer = guarded.get("/cache", params={"q": "a b&c"})
        assert answer.status_code == 303
        form = show(guarded, answer.headers["location"])
        fields = {a["name"]: a.get("value") for tag, a in form.tags if tag == "input"}
        assert fields["next"] == "/cache?q=a+b%26c"
        entered = self.log_in(guarded, READ, str(fields["next"]))
        assert (entered.status_code, entered.headers["location"]) == (303, "/cache?q=a+b%26c")
        flags = entered.headers["set-cookie"].lower()
        assert "httponly" in flags
        assert "samesite=lax" in flags
        assert READ not in flags
        assert guarded.get("/cache").status_code == 200
        assert guarded.get("/v1/jobs").status_code == 200

    def test_over_tls_the_cookie_stays_there(self, store: Store) -> None:
        app = create_app(store, Tokens(READ, WRITE))
        with TestClient(app, base_url="https://tuner", follow_redirects=False) as client:
            assert "secure" in self.log_in(client, READ).headers["set-cookie"].lower()

    @pytest.mark.parametrize("token", [READ, WRITE])
    def test_a_session_reads_and_never_writes(self, guarded: TestClient, token: str) -> None:
        assert self.log_in(guarded, token).status_code == 303
        assert guarded.get("/jobs").status_code == 200
        assert guarded.post("/v1/jobs", json={"problems": [SHAPE]}).status_code == 401
        assert guarded.post(f"/v1/jobs/{'0' * 12}/cancel").status_code == 401

    def test_wrong_tokens(self, guarded: TestClient) -> None:
        for token in ("", "wrong" * 5, READ + " ", HOSTILE, "\udcff"):
            body = {"token": token.encode("utf-8", "surrogatepass"), "next": "/cache"}
            answer = guarded.post("/login", data=body)
            assert answer.status_code == 401
            assert "none of the service's tokens" in Text(answer.text).said
            assert HOSTILE not in answer.text
            assert "set-cookie" not in answer.headers
        many = "&".join(f"a{number}=1" for number in range(50))
        headers = {"content-type": "application/x-www-form-urlencoded"}
        assert guarded.post("/login", content=many, headers=headers).status_code == 422
        assert guarded.post("/login", json={"token": READ}).status_code == 415

    @pytest.mark.parametrize(
        "next",
        [
            "//evil.example",
            "/\\evil.example",
            "https://evil.example",
            "javascript:alert(1)",
            "x",
            "/a\r\nset-cookie: a=b",
            "/\t/evil.example",
            "",
        ],
    )
    def test_it_leads_to_no_other_site(self, guarded: TestClient, next: str) -> None:
        assert self.log_in(guarded, READ, next).headers["location"] == "/"

    def test_logging_out(self, guarded: TestClient) -> None:
        self.log_in(guarded, READ)
        assert "Log out" in show(guarded, "/jobs").said
        copy = {"cookie": f"{COOKIE}={guarded.cookies[COOKIE]}"}
        self.log_in(guarded, READ)  # another browser
        other = guarded.cookies[COOKIE]
        guarded.cookies.clear()
        assert guarded.get("/jobs", headers=copy).status_code == 200
        assert guarded.post("/logout", headers=copy).status_code == 303
        assert guarded.get("/jobs", headers=copy).status_code == 303
        assert guarded.get("/jobs", headers={"cookie": f"{COOKIE}={other}"}).status_code == 200
        assert guarded.post("/logout").status_code == 303  # of nobody

    def test_logins_of_an_address_have_a_limit(self, store: Store) -> None:
        app = create_app(store, Tokens(READ, WRITE))
        clients = [TestClient(app, client=(host, 1)) for host in ("192.0.2.1", "192.0.2.2")]
        for _ in range(MAX_LOGINS):
            assert self.log_in(clients[0], "wrong" * 5).status_code == 401
        refused = self.log_in(clients[0], READ)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) in (1, 2)
        assert "set-cookie" not in refused.headers
        assert self.log_in(clients[1], "wrong" * 5).status_code == 401

    def test_without_tokens_there_is_no_login(self, client: TestClient) -> None:
        assert client.get("/login").status_code == 404
        assert client.post("/login", data={"token": READ}).status_code == 404

    def test_programs_are_refused_as_before(self, guarded: TestClient) -> None:
        assert guarded.get("/v1/jobs").status_code == 401
        assert guarded.get("/jobs", headers={"accept": "*/*"}).status_code == 401
        assert guarded.get("/static/pages.css").status_code == 200

    def test_sessions_end(self) -> None:
        now = [1000.0]
        sessions = Sessions(Tokens(READ, WRITE), clock=lambda: now[0])
        value = sessions.begin(READ)
        assert value is not None
        cookie = f'other={{"a": 1}}; {COOKIE}={value}'.encode()
        assert sessions.is_open(cookie)
        assert not Sessions(Tokens(WRITE, READ), clock=lambda: now[0]).is_open(cookie)
        for wrong in (value[:-1], f"{value}x", value.swapcase(), "", "é.é"):
            assert not sessions.is_open(f"{COOKIE}={wrong}".encode())
        assert not sessions.is_open(b"\xff\x00; =;")
        assert not Sessions(Tokens()).is_open(cookie)
        assert Sessions(Tokens()).begin("") is None
        now[0] += LIFETIME_S
        assert not sessions.is_open(cookie)

    def test_as_many_sessions_are_open_as_are_kept(self) -> None:
        now = [0.0]
        sessions = Sessions(Tokens(READ, WRITE), clock=lambda: now[0])

        def begun() -> bytes:
            return f"{COOKIE}={sessions.begin(READ)}".encode()

        made = [begun() for _ in range(MAX_SESSIONS + 2)]
        assert [sessions.is_open(cookie) for cookie in made[:4]] == [False, False, True, True]
        now[0] = LIFETIME_S
        last = begun()
        assert [sessions.is_open(cookie) for cookie in (made[-1], last)] == [False, True]


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
        found = table.Searcher().find(Table.read(store), "", order=order).entries
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


class TestTrials:
    @pytest.mark.parametrize(
        ("kind", "headline"),
        [
            (Provenance.MEASURED, "own speed 1.33x cudnn."),
            (Provenance.REPLAYED, "REPLAYED: softmax {} won the recorded final pass with 9.00 us"),
            (Provenance.PREDICTED, "PREDICTED: softmax {} has the shortest estimate, 9.00 us"),
        ],
    )
    def test_a_headline_says_where_its_time_is_from(
        self, client: TestClient, store: Store, kind: Provenance, headline: str
    ) -> None:
        facts = {"provenance": kind, "sweep": "x"}
        store.add([measured(9.0, config=OWN, **facts), measured(**facts)])
        said = show(client, "/trials", shape=SHAPE, sweep="x").said
        assert headline.format(OWN.digest[:6]) in said
        assert ("won the final pass" in said) is (kind is Provenance.MEASURED)
        kernel = show(client, "/kernel", shape=SHAPE, config=OWN.digest).said
        assert (f"{str(kind).upper()}: 9.00 us" in kernel) is (kind is not Provenance.MEASURED)

    def test_a_replay_of_the_quick_pass_says_so(self, client: TestClient, store: Store) -> None:
        facts = {"provenance": Provenance.REPLAYED, "sweep": "x", "is_final": False}
        older = measured(8.0, **{**facts, "is_final": True, "flags": ("quick",)})
        store.add([measured(15.0, config=OWN, **facts), measured(**facts), older])
        said = show(client, "/trials", shape=SHAPE, sweep="x").said
        assert f"REPLAYED: Fastest of the quick pass: softmax {OWN.digest[:6]} with 15.0 us" in said
        assert "own speed 0.80x cudnn, slower in the quick pass. No final pass." in said

    def test_time_over_trial_and_failures_by_reason(self, client: TestClient, store: Store) -> None:
        log = f"{HOSTILE}\nmore"
        failing = [quick(n, None, log=log) for n in (3, 4)]
        other = quick(5, None, status=Status.WRONG_RESULT, log="off by one")
        store.add([quick(1, 14.0), quick(2, 13.0), *failing, other])
        page = show(client, "/trials", shape=SHAPE)
        assert "13.0 us. No final pass yet." in page.said
        assert "5 of the quick pass, 3 failed" in page.said
        assert f"compile error 2 {HOSTILE} softmax" in page.said
        assert page.said.index("compile error 2") < page.said.index("wrong result 1 off by one")
        assert not [tag for tag in page.tags if tag[0] == "script" and not tag[1]]

    def test_runs_are_kept_apart(self, store: Store) -> None:
        changes = [
            {"sweep": "t"},
            {"regime": Regime("eager", "warm")},
            {"provenance": Provenance.REPLAYED},
            {"environment": Environment({"driver": "590"})},
        ]
        store.add([quick(1, 14.0), *(quick(1, 12.0, **change) for change in changes)])
        found = [run for run in trials.runs(store, PROBLEM) if run.quick]
        assert [len(run.measurements) for run in found] == [1] * 5
        assert len({run.key for run in found}) == 5
        assert all(trials.choose(found, key=run.key) is run for run in found)
        first = trials.choose(found, sweep="t")
        assert first is not None
        assert first.sweep == "t"
        eager = trials.choose(found, regimes=[Regime("eager", "warm")])
        assert eager is not None
        assert eager.regime.launch == "eager"
        only = [run for run in found if run.provenance is Provenance.REPLAYED]
        assert trials.choose(only) is only[0]
        assert trials.choose(found, gpu="NVIDIA H100") is None

    def test_the_best_so_far(self, store: Store) -> None:
        store.add([quick(1, 14.0), quick(2, None), quick(3, 15.0), quick(4, 13.0)])
        (run,) = (run for run in trials.runs(store, PROBLEM) if run.quick)
        assert [step.best_us for step in run.steps] == [14.0, 14.0, 14.0, 13.0]
        assert run.picture is not None
        store.forget(PROBLEM)
        store.add([quick(2, None)])
        (run,) = trials.runs(store, PROBLEM)
        assert (run.picture, run.best, run.entry) == (None, None, None)

    def test_replayed_trials_keep_the_order_of_the_search(self, store: Store) -> None:
        """Their times are those of the recording."""
        changes = {"provenance": Provenance.REPLAYED, "sweep": "r"}
        store.add([quick(number, 20.0 - number, **changes) for number in (5, 1, 3)])
        run = trials.choose(trials.runs(store, PROBLEM), sweep="r")
        assert run is not None
        assert [step.best_us for step in run.steps] == [15.0, 15.0, 15.0]
        store.add([quick(5, 15.0, **{**changes, "sweep": "later"})])
        newest = trials.runs(store, PROBLEM)[0]
        assert newest.sweep == "later"

    def test_what_ships_is_shown_too(self, client: TestClient) -> None:
        page = show(client, "/trials", shape="S=1024,D=64")
        assert "from the shipped recording" in page.said
        assert "fused_attention" in page.said

    def test_a_problem_of_a_job_shows_its_own_sweep(self, client: TestClient, store: Store) -> None:
        id = store.jobs.submit([PROBLEM], {})
        before = show(client, "/trials", shape=SHAPE, job=id)
        assert "Nothing was measured yet." in before.said
        claim = store.jobs.claim("host:1")
        assert claim is not None
        store.jobs.begin(claim.lease, "s")
        store.add([quick(1, 11.5)])
        page = show(client, "/trials", shape=SHAPE, job=id)
        assert "11.5 us" in page.said
        assert ("body", {"data-events": f"/v1/jobs/{id}/events"}) in page.tags
        show(client, "/trials", 404, shape="S=648,D=64", job=id)

    def test_a_problem_that_nobody_knows(self, client: TestClient) -> None:
        assert "Nothing was measured." in show(client, "/trials", shape="S=8,D=64").said


class TestKernel:
    def test_source_and_resources(self, client: TestClient) -> None:
        trial = show(client, "/trials", shape="S=1024,D=64")
        link = next(link for link in trial.links if link.startswith("/kernel"))
        page = show(client, link)
        assert "constexpr int kTileN = 128" in page.words
        assert "#include <cute/tensor.hpp>" in page.words
        assert "registers a thread" in page.said
        assert re.search(r"attention 128 0 B \+ 0 B 0 B 0 B not built here", page.said)

    def test_spills_and_artifacts(self, client: TestClient, store: Store) -> None:
        changes = {
            "resources": {"main": Resources(168, 4, 8, 16, 1024)},
            "artifacts": {"main": "ab" * 16},
        }
        store.add([quick(1, 12.0, **changes)])
        digest = quick(1, 12.0).config.digest
        said = show(client, "/kernel", shape=SHAPE, config=digest).said
        assert "main 168 4 B + 8 B 16 B 1.0 kB abababababababab" in said
        assert "This version of the program does not have this configuration." in said

    def test_a_vendors_kernel_has_no_source(self, client: TestClient) -> None:
        digest = measured().config.digest
        assert "it has no source here" in show(client, "/kernel", shape=SHAPE, config=digest).said

    def test_a_failure_shows_its_log(self, client: TestClient, store: Store) -> None:
        store.add([quick(1, None, log=f"first\n{HOSTILE}")])
        digest = quick(1, None).config.digest
        page = show(client, "/kernel", shape=SHAPE, config=digest)
        assert HOSTILE in page.words
        assert "Compile error on H200, stream-warm, for" in page.said

    def test_its_time_is_that_of_the_gpu_and_regime_it_was_come_from(
        self, client: TestClient, store: Store
    ) -> None:
        decide(store, measured(11.3, gpu=GPUS["H100"], created_at="2027-01-01T00:00:00+00:00"))
        decide(store, measured(19.0, regime=Regime("stream", "cold")))
        eventually(lambda: len(self.links(client)) == 3)
        headlines = [show(client, link).said.partition(", for ")[0] for link in self.links(client)]
        assert sorted(line.split(measured().config.digest + " ")[1] for line in headlines) == [
            "11.3 us on H100 80GB HBM3, stream-warm",
            "12.0 us on H200, stream-warm",
            "19.0 us on H200, stream-cold",
        ]

    def links(self, client: TestClient) -> list[str]:
        """Of the cache's rows of the problem to their kernels."""
        page = show(client, "/cache", q=SHAPE)
        return [link for link in page.links if link.startswith("/kernel")]

    def test_where_it_was_never_measured(self, client: TestClient) -> None:
        query = {"shape": SHAPE, "config": measured().config.digest}
        page = show(client, "/kernel", 404, **query, gpu="NVIDIA H100", l2="warm")
        assert "S=640,D=64,dtype=fp16 on NVIDIA H100, stream-warm" in page.said


class TestCompare:
    BEFORE, AFTER = Environment({"driver": "580"}), Environment({"driver": "590"})

    @pytest.fixture
    def updated(self, store: Store) -> Store:
        """PROBLEM became slower, OTHER was not measured again."""
        other = AttentionProblem.parse("S=704,D=64")
        decide(store, measured(20.0, other, sweep="a", created_at="2026-11-01T00:00:00+00:00"))
        new = {"environment": self.AFTER, "created_at": "2026-11-02T00:00:00+00:00"}
        decide(store, measured(13.0, sweep="b", **new))
        return store

    def test_two_environments(self, client: TestClient, updated: Store) -> None:
        digests = {"a": self.BEFORE.digest, "b": self.AFTER.digest}
        page = show(client, "/compare", **digests)
        assert "Of 1 problem in both, 0 became faster, 1 slower, 0 stayed the same." in page.said
        assert "driver 580 590" in page.said
        assert "12.0 13.0 ▲ 0.92x, slower" in page.said
        assert "Only before: 1 problem" in page.said
        chosen = [a["value"] for tag, a in page.tags if tag == "option" and "selected" in a]
        assert chosen == [self.BEFORE.digest, self.AFTER.digest]
        back = show(client, "/compare", a=digests["b"], b=digests["a"])
        assert "1 became faster, 0 slower" in back.said
        # The vendor's kernel is the only one: against itself nothing changed.
        assert "1 stayed the same" in show(client, "/compare", **digests, relative="true").said

    def test_older_passes_are_found_though_a_newer_one_decides(self, updated: Store) -> None:
        (before,) = (
            e for e in environments.entries_in(updated, self.BEFORE.digest) if e.problem == PROBLEM
        )
        assert before.winner.latency_us == 12.0
        (stored,) = updated.entries(problem=PROBLEM)
        assert stored.winner.latency_us == 13.0

    def test_of_one_environment_the_newest_pass_counts(self, store: Store) -> None:
        at = "2026-12-01T00:00:00+00:00"
        decide(store, measured(11.0, sweep="later", created_at=at))
        (entry,) = environments.entries_in(store, self.BEFORE.digest)
        assert entry.winner.latency_us == 11.0

    def test_what_cannot_be_compared(self, client: TestClient, updated: Store) -> None:
        shipped = next(one for one in environments.known(updated) if one.is_shipped).digest
        nothing = show(client, "/compare", a=self.BEFORE.digest, b=shipped)
        assert "have no problem, GPU and regime in common" in nothing.said
        same = show(client, "/compare", a=shipped, b=shipped)
        assert "These are the same environment." in same.said
        show(client, "/compare", 404, a="0" * 16, b=shipped)
        show(client, "/compare", 422, a=HOSTILE, b=shipped)


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
        assert claim is not None
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


class TestReport:
    """From a verdict to why it is so."""

    def test_the_verdict_links_to_it(self, client: TestClient) -> None:
        page = show(client, "/trials", shape="S=1024,D=64", gpu="NVIDIA H200")
        link = next(link for link in page.links if link.startswith("/report?"))
        answer = client.get(link)
        assert answer.status_code == 200
        text = Text(answer.text).said
        assert "fused_attention b68d7d computes attention B=1,H=16,S=1024,D=64,dtype=fp16" in text
        assert "tuner build --shape B=1,H=16,S=1024,D=64,dtype=fp16" in text

    def test_its_scripts_reach_nothing(self, client: TestClient) -> None:
        answer = client.get("/report", params={"shape": SHAPE})
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("sandbox allow-scripts; default-src 'none'; ")
        assert "allow-same-origin" not in policy
        assert "connect-src" not in policy
        assert "frame-ancestors 'none'" in policy

    def test_what_was_not_measured_has_none(self, client: TestClient) -> None:
        text = show(client, "/report", status=404, shape="S=777,D=64").said
        assert "nothing was measured for attention B=1,H=16,S=777,D=64" in text


class TestSubmitting:
    """Forms that write; what they send is the API's."""

    def test_the_token_is_asked_for_where_there_is_one(
        self, client: TestClient, guarded: TestClient, store: Store
    ) -> None:
        id = store.jobs.submit([PROBLEM], {})
        guarded.post("/login", data={"token": READ, "next": "/"})
        for path in ("/jobs/new", f"/jobs/{id}"):
            for served, asks in ((client, False), (guarded, True)):
                fields = [a.get("name") for tag, a in show(served, path).tags if tag == "input"]
                assert ("token" in fields) == asks, path

    def test_without_its_script_a_form_sends_nothing(
        self, client: TestClient, store: Store
    ) -> None:
        """A browser would put the token into an address."""
        id = store.jobs.submit([PROBLEM], {})
        for path, name in (("/jobs/new", "new-job"), (f"/jobs/{id}", "cancel-job")):
            tags = show(client, path).tags
            start = next(at for at, (_, found) in enumerate(tags) if found.get("id") == name)
            assert tags[start][1]["method"] == "post"
            button = next(found for tag, found in tags[start:] if tag == "button")
            assert "disabled" in button

    def test_a_job_that_ended_cannot_be_cancelled(self, client: TestClient, store: Store) -> None:
        id = store.jobs.submit([PROBLEM], {})
        assert "Cancel this job" in show(client, f"/jobs/{id}").said
        store.jobs.cancel(id)
        assert "Cancel this job" not in show(client, f"/jobs/{id}").said


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
            ("directive", "#include &lt;a.h&gt;"),
            ("keyword", "for"),
            ("keyword", "int"),
            ("number", "0x1f"),
            ("string", "&quot;for&quot;"),
            ("comment", "// for"),
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
