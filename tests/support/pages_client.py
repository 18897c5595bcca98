"""A client of the service's pages, and a page's text as a reader sees it."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

from serving import LOCAL, measured, served_store
from starlette.testclient import TestClient

from tuner.config import Config
from tuner.measurement import Measurement, Status
from tuner.service.app import create_app
from tuner.service.tokens import Tokens
from tuner.store import Store

HTML = {"accept": "text/html"}


OWN = Config("softmax", {"rows_per_block": 1})


HOSTILE = "<script>alert('x')</script> & \"quoted\""


store = served_store


@pytest.fixture
def client_fixture(store: Store) -> Iterator[TestClient]:
    made = TestClient(create_app(store, Tokens()), base_url=LOCAL, headers=HTML)
    with made:
        yield made


class Text(HTMLParser):
    """Text that a reader sees, and that of the tags."""

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
