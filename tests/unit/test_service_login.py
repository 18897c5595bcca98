"""Logins and sessions of the service's pages, and the forms that write."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

from pages_client import (
    HOSTILE,
    HTML,
    Text,
    client_fixture,
    show,
)
from serving import PROBLEM, READ, SHAPE, WRITE, served_store
from starlette.testclient import TestClient

from tuner.service.app import create_app
from tuner.service.pages import routes
from tuner.service.pages.routes import MAX_LOGINS
from tuner.service.rates import RateLimit
from tuner.service.tokens import COOKIE, LIFETIME_S, MAX_SESSIONS, Sessions, Tokens
from tuner.store import Store

store = served_store
client = client_fixture


@pytest.fixture
def guarded(store: Store) -> Iterator[TestClient]:
    app = create_app(store, Tokens(READ, WRITE))
    with TestClient(app, base_url="http://tuner", headers=HTML, follow_redirects=False) as made:
        yield made


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

    def test_logins_of_an_address_have_a_limit(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By a clock that stands still: a slow machine would fill the bucket again."""
        monkeypatch.setattr(routes, "RateLimit", partial(RateLimit, clock=lambda: 1000.0))
        app = create_app(store, Tokens(READ, WRITE))
        clients = [TestClient(app, client=(host, 1)) for host in ("192.0.2.1", "192.0.2.2")]
        for _ in range(MAX_LOGINS):
            assert self.log_in(clients[0], "wrong" * 5).status_code == 401
        refused = self.log_in(clients[0], READ)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "2"
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
