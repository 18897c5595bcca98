"""The service's pages in a real browser that has no network but the service."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

import browser as browsers
from browser import Browser
from serving import H200, PROBLEM, READ, SHAPE, WRITE, decide, measured, service

from tuner.config import Config
from tuner.measurement import Environment, Regime, Status
from tuner.problem import GemmProblem
from tuner.report import page
from tuner.report.subject import from_known
from tuner.store import Store, open_store
from tuner.store.jobs import Claim

pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
PHONE, DESK = 390, 1280
PATHS = (
    "/",
    "/cache",
    "/jobs",
    "/jobs/new",
    "/report?shape=S%3D1024,D%3D64",
    "/trials?shape=S%3D1024,D%3D64",
    "/compare",
    f"/compare?a={Environment({'driver': '580'}).digest}&b={Environment({'driver': '590'}).digest}",
    "/nowhere",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if reason := browsers.missing():
        pytest.skip(reason)
    with browsers.browser() as made:
        yield made


@dataclass(frozen=True)
class Site:
    """A service with its store."""

    address: str
    store: Store

    def claim(self) -> tuple[str, Claim]:
        """A job of two problems, the first of them taken by a controller that begins a sweep."""
        options = {"effort": "quick"}
        id = self.store.jobs.submit([PROBLEM, GemmProblem(128, 128, 64)], options, priority=9)
        claim = self.store.jobs.claim("host:1")
        assert claim.job == id
        self.store.jobs.begin(claim.lease, f"sweep{id}")
        return id, claim

    def trial(self, id: str, number: int, us: float | None) -> None:
        """A measurement of the sweep of a job."""
        failed = {"status": Status.TIMEOUT, "latency_us": None, "std_us": None, "log": "hung"}
        trial = measured(
            us or 1.0,
            config=Config("softmax", {"rows_per_block": number}),
            is_final=False,
            sweep=f"sweep{id}",
            created_at=f"2026-11-21T10:00:{number:02}.000+00:00",
        )
        self.store.add([trial if us else trial.but(**failed)])


@pytest.fixture(scope="module")
def served(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One service for all; asks for the browser first, without which nothing need be started."""
    url = str(tmp_path_factory.mktemp("served") / "s.sqlite")
    with open_store(url) as store:
        decide(store, measured(sweep="a"))
        newer = {"environment": Environment({"driver": "590"}), "sweep": "b"}
        decide(store, measured(13.0, **newer, created_at="2026-11-02T00:00:00+00:00"))
        with service(url) as (address, _):
            yield Site(address, store)


@pytest.fixture
def site(served: Site) -> Iterator[Site]:
    """The service, without open jobs."""
    yield served
    for job in served.store.jobs.all():
        served.store.jobs.cancel(job.id)


@pytest.fixture(autouse=True)
def quiet(browser: Browser) -> Iterator[None]:
    """No page of one test asks for anything, or is heard, in the next."""
    yield
    browser.go("about:blank")
    browser.complaints()


POINTS = "document.querySelectorAll('#run ~ figure .mark-symbol.role-mark path').length"
CROSSES = "document.querySelectorAll('#run ~ figure .mark-text.role-mark text').length"


def test_every_page_fits_and_asks_nobody_else(browser: Browser, site: Site) -> None:
    id, _ = site.claim()
    kernel = f"/kernel?shape={SHAPE}&config={measured().config.digest}"
    for path in (*PATHS, f"/jobs/{id}", kernel):
        for width, is_dark in itertools.product((DESK, PHONE), (False, True)):
            browser.resize(width, is_dark=is_dark)
            browser.go(site.address + path)
            browser.wait("document.readyState === 'complete'")
            too_wide = (
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert browser.run(too_wide) == 0, f"{path} at {width}"
            paper = browser.run("return getComputedStyle(document.body).backgroundColor")
            assert (paper == "rgb(255, 255, 255)") != is_dark
            asked = browser.run("return performance.getEntriesByType('resource').map(e => e.name)")
            assert all(name.startswith((site.address, "data:")) for name in asked)
            complaints = [c for c in browser.complaints() if "404 (Not Found)" not in c]
            assert complaints == [], path


#: Texts of pictures that their picture cuts off.
CUT_OFF = """
return [...document.querySelectorAll('.chart svg text')].filter(text => {
  const own = text.getBoundingClientRect(), all = text.ownerSVGElement.getBoundingClientRect();
  return own.width > 0 && (own.left < all.left - 1 || own.right > all.right + 1);
}).map(text => text.textContent);
"""


def test_no_picture_of_a_report_cuts_off_its_words(browser: Browser, tmp_path: Path) -> None:
    """A kernel that keeps one unit busy for most of its time has a bar to the border."""
    problem = GemmProblem.parse("M=4096,N=4096,K=4096")
    report = tmp_path / "report.html"
    subject = from_known(problem, H200, Regime.choices("gemm"), None)
    report.write_text(page.render(subject), encoding="utf-8")
    for width in (DESK, PHONE):
        browser.resize(width)
        browser.go(report.as_uri())
        browser.wait("document.querySelectorAll('#chart-limits svg text').length > 5")
        browser.wait("document.querySelectorAll('.chart:not(:has(svg))').length === 0")
        assert browser.run(CUT_OFF) == [], width


def test_the_picture_holds_every_trial(browser: Browser, site: Site) -> None:
    browser.resize(DESK)
    browser.go(f"{site.address}/trials?shape=S%3D1024,D%3D64")
    points = browser.wait(POINTS)
    trials = browser.run("return JSON.parse(document.getElementById('picture').textContent)")
    passed = [value for value in trials["data"]["values"] if value["status"] == "ok"]
    assert points == len(passed) > 100


def test_a_job_is_followed_live(browser: Browser, site: Site) -> None:
    id, claim = site.claim()
    browser.resize(DESK)
    browser.go(f"{site.address}/jobs/{id}")
    browser.wait("document.getElementById('live').textContent === 'live'")
    browser.wait("document.getElementById('log').innerText.includes('attempt 1 by host:1')")
    browser.run("window.mine = 1")
    told = {"phase": "search", "done": 3, "goal": 12, "best_own_us": 11.25}
    site.store.jobs.extend(claim.lease, told)
    browser.wait("document.getElementById('tasks').innerText.includes('search 3/12 on host:1')")
    site.store.jobs.log(id, "<b>a note</b>", claim.lease.task)
    browser.wait("document.getElementById('log').innerText.includes('<b>a note</b>')")
    site.store.jobs.finish(claim.lease, "cudnn, 12.0 us")
    site.store.jobs.cancel(id)
    browser.wait("document.getElementById('live').textContent === 'ended: cancelled'")
    browser.wait("document.getElementById('head').innerText.includes('1\\u00a0cancelled')")
    log = browser.run("return document.getElementById('log').innerText")
    assert log.count("submitted, problems: 2") == 1
    assert browser.run("return window.mine") == 1, "it was loaded anew"
    assert browser.complaints() == []


def test_trials_appear_as_they_are_measured(browser: Browser, site: Site) -> None:
    id, claim = site.claim()
    browser.resize(DESK)
    browser.go(f"{site.address}/trials?shape={SHAPE}&job={id}")
    browser.wait("document.body.innerText.includes('Nothing was measured yet.')")
    for number, us in enumerate((14.0, None, 13.0), 1):
        site.trial(id, number, us)
    browser.wait("document.body.innerText.includes('13.0 us. No final pass yet.')")
    browser.wait(f"{POINTS} === 2 && {CROSSES} === 1")
    assert "timeout\t1" in browser.text
    site.trial(id, 4, 11.0)
    browser.wait(f"document.body.innerText.includes('11.0 us') && {POINTS} === 3")
    site.store.jobs.finish(claim.lease, "done")
    assert browser.complaints() == []


def test_the_list_of_jobs_follows(browser: Browser, site: Site) -> None:
    browser.go(f"{site.address}/jobs")
    browser.wait("document.getElementById('live').textContent === 'live'")
    id, _ = site.claim()
    browser.wait("document.getElementById('jobs').innerText.includes(arguments[0])", id)
    assert "1\N{NO-BREAK SPACE}queued, 1\N{NO-BREAK SPACE}running" in browser.text


def test_searching_while_typing(browser: Browser, site: Site) -> None:
    browser.go(f"{site.address}/cache")
    rows = "document.querySelectorAll('#found tbody tr').length"
    assert browser.wait(rows) > 10
    browser.run(
        "const box = document.getElementById('q'); box.focus(); box.value = arguments[0];"
        "box.dispatchEvent(new Event('input', {bubbles: true}))",
        "cudnn s=640",
    )
    browser.wait(f"{rows} === 1")
    assert browser.run("return location.search") == "?q=cudnn+s%3D640"
    assert browser.run("return document.activeElement.id") == "q"


def test_every_control_has_a_name_and_can_be_reached(browser: Browser, site: Site) -> None:
    """Labels for those who hear a page, and the keyboard for those who use no pointer."""
    id, _ = site.claim()
    kernel = f"/kernel?shape={SHAPE}&config={measured().config.digest}"
    browser.resize(DESK)
    for path in (*PATHS, f"/jobs/{id}", kernel):
        browser.go(site.address + path)
        nameless = browser.run(
            "return [...document.querySelectorAll('a, button, input:not([type=hidden]), select,"
            " textarea, summary, progress, [role=img], [role=region]')].filter(e => {"
            " const by = e.getAttribute('aria-labelledby');"
            " const said = e.getAttribute('aria-label') || e.title || e.innerText.trim()"
            " || [...(e.labels ?? [])].map(l => l.innerText).join('')"
            " || (by && document.getElementById(by)?.innerText);"
            " return !said && e.checkVisibility(); }).map(e => e.outerHTML.slice(0, 90))"
        )
        assert nameless == [], path
        lost = browser.run(
            "return [...document.querySelectorAll('a[href], button, input, select, textarea')]"
            ".filter(e => e.tabIndex < 0).length"
        )
        assert lost == 0, path


def test_sources_can_be_copied(browser: Browser, site: Site) -> None:
    browser.go(f"{site.address}/trials?shape=S%3D1024,D%3D64")
    link = browser.wait("document.querySelector('.verdict a[href^=\\'/kernel\\']')?.href")
    browser.go(link)
    browser.wait("document.querySelector('[data-copy]:not([hidden])') !== null")
    browser.run(
        "navigator.clipboard.writeText = async (text) => { window.copied = text; };"
        "document.querySelector('[data-copy]').click()"
    )
    browser.wait("document.querySelector('[data-copy]').textContent === 'Copied'")
    source = browser.run("return document.querySelector('.source .text').textContent")
    assert browser.run("return window.copied") == source
    assert source.startswith("#include")
    assert browser.run("return document.querySelectorAll('.tok-keyword').length") > 10


def test_submitting_and_cancelling_with_a_token(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_READ_TOKEN", READ)
    monkeypatch.setenv("TUNER_WRITE_TOKEN", WRITE)
    url = str(tmp_path / "s.sqlite")
    log_in = (
        "document.getElementById('token').value = arguments[0];"
        "document.querySelector('.login button').click()"
    )
    send = (
        "const form = document.getElementById(arguments[0]);"
        "form.querySelector('[name=token]').value = arguments[1];"
        "form.querySelector('button').click()"
    )
    fault = "document.querySelector('.fault:not([hidden])')?.textContent"
    with open_store(url) as store, service(url) as (address, _):
        browser.go(f"{address}/jobs/new")
        browser.run(log_in, READ)
        browser.wait("location.pathname === '/jobs/new' && document.readyState === 'complete'")
        browser.run("document.getElementById('problems').value = 'S=640,D=64\\n\\nS=64,Q=1'")
        browser.run(send, "new-job", READ)
        assert browser.wait(fault) == "this token may only read"
        browser.run(send, "new-job", WRITE)
        assert browser.wait(f"({fault})?.startsWith('problems.1: ')")
        assert store.jobs.all() == []
        browser.run("document.getElementById('problems').value = 'S=640,D=64'")
        browser.run(send, "new-job", WRITE)
        browser.wait("/^.jobs.[0-9a-f]{12}$/.test(location.pathname)")
        (job,) = store.jobs.all()
        assert [task.problem for task in store.jobs.tasks(job.id)] == [PROBLEM]
        browser.wait("document.getElementById('live')?.textContent === 'live'")
        browser.run(send, "cancel-job", WRITE)
        browser.wait("document.body.innerText.includes('cancelled')")
        browser.wait("document.getElementById('cancel-job') === null")
        assert [job.state for job in store.jobs.all()] == ["cancelled"]
        stored = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        assert WRITE not in browser.run(f"return {stored}")


def test_a_service_that_is_away_is_said(browser: Browser, tmp_path: Path) -> None:
    with service(str(tmp_path / "s.sqlite")) as (address, process):
        browser.go(f"{address}/jobs")
        browser.wait("document.getElementById('live').textContent === 'live'")
        process.kill()
        browser.wait("document.getElementById('live').textContent.startsWith('not current')")


def test_logging_in(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_READ_TOKEN", READ)
    monkeypatch.setenv("TUNER_WRITE_TOKEN", WRITE)
    url = str(tmp_path / "s.sqlite")
    submit = (
        "document.getElementById('token').value = arguments[0];"
        "document.querySelector('.login button').click()"
    )
    with open_store(url) as store, service(url) as (address, _):
        id = store.jobs.submit([PROBLEM], {})
        browser.go(f"{address}/jobs/{id}")
        assert browser.run("return location.pathname") == "/login"
        browser.run(submit, "wrong")
        browser.wait("document.body.innerText.includes('none of the service')")
        browser.run(submit, READ)
        browser.wait("location.pathname === arguments[0]", f"/jobs/{id}")
        # The stream goes by the session too.
        browser.wait("document.getElementById('live')?.textContent === 'live'")
        assert browser.run("return document.cookie") == ""
        browser.run("document.querySelector('.top button').click()")
        browser.wait("location.pathname === '/login'")
        browser.go(f"{address}/jobs")
        assert browser.run("return location.pathname") == "/login"
