"""Nothing that comes from elsewhere acts on the terminal that it is shown on."""

from __future__ import annotations

import importlib
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from stored import H200, OWN, PROBLEM, WARM, measured

from tuner.base.printable import (
    PrintableStream,
    one_line,
    printable,
    raw_stream,
    without_password,
)
from tuner.cli import main
from tuner.cli.display import LiveDisplay
from tuner.errors import ConfigError
from tuner.measurement import Environment
from tuner.selection import portfolio
from tuner.store import open_store
from tuner.store.exchange import read, to_text

READER = importlib.import_module("tuner.selection.reader")

EVIL = "\x1b]0;owned\x07\x9b31m\u202egnp.exe\u2028"
#: All of what a terminal acts on, and what changes the order of characters.
ACTS = [*map(chr, (*range(9), *range(11, 32), *range(127, 160))), *"\u2028\u202e\u2066\ud800"]


@pytest.mark.parametrize("character", [*ACTS, "\n", "\t"])
def test_control_characters_are_escaped(character: str) -> None:
    shown = printable(f"a{character}b")
    assert character not in shown
    assert shown.isascii() and shown.startswith("a\\") and shown.endswith("b")


def test_other_characters_stay() -> None:
    text = "µs, naïve, 速い, \U0001f680 \\x1b"
    assert printable(text) == text
    assert printable("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"


def test_a_stream_escapes_what_is_written_and_is_the_other_one_else() -> None:
    raw = io.StringIO()
    stream = PrintableStream(raw)
    print("one\x1b[2J", "two\n\tthree", file=stream)  # type: ignore[arg-type]
    stream.writelines(["\x07", "four"])
    assert stream.getvalue() == "one\\x1b[2J two\n\tthree\n\\x07four"
    assert raw_stream(stream) is raw is raw_stream(raw)


@pytest.fixture
def evil_file(tmp_path: Path) -> Iterator[Path]:
    """An export whose texts are as bad as the schema allows."""
    gpu = replace(H200, name="NVIDIA H200\x9b31m\u202e")
    environment = Environment({"driver": EVIL, EVIL: "1"})
    made = measured(gpu=gpu, environment=environment, log=EVIL, sweep="\x9bs\u202e")
    with open_store(str(tmp_path / "theirs.sqlite")) as store:
        store.decide(PROBLEM, gpu, WARM, [made.but(config=OWN)], "\x9bs\u202e")
        path = tmp_path / "evil.json"
        path.write_text(to_text(store.export(trials=True)))
    yield path
    READER.close()


def acts(text: str) -> list[str]:
    return [character for character in text if character in ACTS]


@pytest.mark.parametrize(
    "command",
    [
        ["list"],
        ["lookup", "--shape", "S=1024,D=64", "--allow-other-gpu"],
        ["show", "--shape", "S=1024,D=64", "--allow-other-gpu"],
        ["lookup", "--shape", "S=8,D=64", "--gpu", f"H{EVIL}"],
        ["export"],
        ["jobs", "show", f"x{EVIL}"],
    ],
    ids=lambda command: command[0],
)
def test_commands_print_no_control_character(
    command: list[str],
    evil_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tuner.selection.shipped._tuned", lambda: evil_file.parent / "none")
    monkeypatch.setattr("tuner.cli.entries._detected", lambda: None)
    monkeypatch.setattr("tuner.selection.portfolio._folder", lambda: evil_file.parent / "none")
    portfolio.shipped.cache_clear()
    READER.shipped.cache_clear()
    READER.shipped_index.cache_clear()
    # Their kernels may be legal: what is refused is shown by the test below.
    monkeypatch.setattr("tuner.cli.imports.unservable", lambda measurement: [])
    assert main(["import", str(evil_file)]) == 0
    main(command)
    done = capsys.readouterr()
    assert not acts(done.out) and not acts(done.err)
    assert "\\x9b" in done.out + done.err or "\\u009b" in done.out + done.err
    READER.shipped.cache_clear()
    READER.shipped_index.cache_clear()
    portfolio.shipped.cache_clear()


def test_a_refused_file_adds_no_line_of_its_own(evil_file: Path) -> None:
    document = json.loads(evil_file.read_text())
    document["measurements"][0]["problem"]["x\ntuner: all is well"] = 1
    with pytest.raises(ConfigError) as error:
        read(document)
    first, *rows = str(error.value).splitlines()
    assert "does not fit" in first or "do not fit" in first
    assert all(row.startswith("  ") for row in rows)


@pytest.fixture
def hostile_server() -> Iterator[Callable[[bytes], str]]:
    """Starts a server that answers 400 with a body; gives its address."""
    servers: list[HTTPServer] = []

    def start(body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(400)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        with closing(server.socket):
            server.shutdown()


def test_a_server_s_message_is_a_part_of_one_line(
    hostile_server: Callable[[bytes], str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = f"no{EVIL}\ntuner: {'x' * 999}"
    assert main(["sync", hostile_server(json.dumps({"error": message}).encode())]) == 1
    text = capsys.readouterr().err
    assert text.startswith("tuner: http://127.0.0.1") and text.count("\n") == 1
    assert not acts(text) and "\\x1b]0;owned\\x07" in text
    assert len(text) < 400


def test_a_panel_is_still_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", PrintableStream(sys.stderr))
    with LiveDisplay("s.sqlite", show_results=True) as display:
        display.note(f"from elsewhere: {EVIL}")
    text = capsys.readouterr().err
    assert "\x1b[" in text, "the panel's own"
    assert "from elsewhere: \\x1b]0;owned\\x07\\x9b31m\\u202egnp.exe\\u2028" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        (" a\n\tb\x85 ", "a b"),
        ("\x1b[2J\udcff\0", r"\x1b[2J\udcff\x00"),
        ("ü" * 20, "ü" * 20),
        ("ü" * 21, "ü" * 17 + "..."),
        (" " * 1000 + "end", "..."),
    ],
)
def test_text_from_elsewhere_is_one_line(text: str, shown: str) -> None:
    assert one_line(text, 20) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://secret@host:1/x", "https://***@host:1/x"),
        ("http://me:secret@host", "http://***@host"),
        ("postgresql+psycopg://me:se@cr/et@host/x", "postgresql+psycopg://me:***@host/x"),
        (
            "postgresql://me@host/x?password=secret&connect_timeout=5",
            "postgresql://me@host/x?password=***&connect_timeout=5",
        ),
        ("http://host/?a=b&Access_Token=secret", "http://host/?a=b&Access_Token=***"),
        ("sqlite:////a:b/c.sqlite", "sqlite:////a:b/c.sqlite"),
        ("journal.log", "journal.log"),
    ],
)
def test_a_url_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize("url", ["http://secret@host", "ftp://me:secret@host"])
def test_the_url_of_no_service_shows_no_password(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "sync", url]) == 2
    assert "secret" not in capsys.readouterr().err
