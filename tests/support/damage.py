"""Stores that a bad disk, a cut or another program left damaged."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from stored import CUDNN, H100, H200, OTHER, OWN, PROBLEM, SLOWER, WARM, failed, full, measured

from tuner.measurement import Measurement
from tuner.problem import AttentionProblem, GemmProblem
from tuner.store import SweepRecord, open_store

SMALL = AttentionProblem.parse("S=16,D=8,H=2")
"""Decided, and quickly computed on a CPU."""
PAGE = 4096
"""Bytes of a page of the SQLite file."""
FILES = ("", "-wal")
"""Ends of the names of the files whose damage matters: SQLite makes the third one anew."""


def fill(path: Path) -> None:
    """Write something into every table of a new store."""
    with open_store(str(path)) as store:
        store.begin_sweep(SweepRecord("sweep1", PROBLEM, H200, WARM, "e", "quick"))
        store.add([full(), failed(sweep="sweep1"), failed(SLOWER, log="error: " + "x" * 300)])
        for length in range(1088, 1600, 64):
            near = AttentionProblem(length, length, 64)
            store.add([measured(c, 9.0, problem=near, is_final=False) for c in (OWN, SLOWER)])
        for problem in (PROBLEM, OTHER, SMALL):
            ranking = [measured(c, 9.0 + i) for i, c in enumerate((OWN, CUDNN, SLOWER))]
            ranking = [m.but(problem=problem) for m in ranking]
            store.decide(problem, H200, WARM, ranking, "sweep1")
        store.decide(PROBLEM, H100, WARM, [measured(gpu=H100)], "sweep2")
        store.pin(PROBLEM, H200, WARM, SLOWER)
        store.record_build(PROBLEM, SLOWER, {"main": "ab" * 16})
        store.end_sweep("sweep1", "done")
        store.jobs.submit([PROBLEM, GemmProblem(64, 64, 64)], {"effort": "full"}, priority=2)
        claim = store.jobs.claim("host:1")
        store.jobs.begin(claim.lease, "sweep1")
        store.jobs.extend(claim.lease, {"phase": "search", "done": 1, "goal": 2})
        store.mirror(_elsewhere(store.export()), url="http://host:1", etag="x", check=lambda m: [])


def _elsewhere(document: dict[str, object]) -> dict[str, object]:
    return {**document, "measurements": [], "entries": []}


def files_of(path: Path) -> dict[str, bytes]:
    """A store's files as a machine that went down leaves them, by the ends of their names: the
    newest rows are in the log.
    """
    fill(path)
    with open_store(str(path)) as store:
        for n in range(3):
            store.decide(OTHER, H200, WARM, [_late(n)], "sweep3")
        return {end: Path(f"{path}{end}").read_bytes() for end in FILES}


def _late(n: int) -> Measurement:
    return replace(measured(latency_us=5.0 + n), problem=OTHER)


def flip(content: bytearray, draw: random.Random) -> None:
    """Change one to eight bits, half of the times on the first pages, where the schema is."""
    end = len(content) if draw.random() < 0.5 else min(len(content), 4 * PAGE)
    for _ in range(draw.choice((1, 1, 2, 8))):
        content[draw.randrange(end)] ^= 1 << draw.randrange(8)


def scribble(content: bytearray, draw: random.Random) -> None:
    """Write some random bytes over others."""
    start, length = draw.randrange(len(content)), draw.choice((1, 4, 64, 600))
    content[start : start + length] = draw.randbytes(length)[: len(content) - start]


def rewrite(content: bytearray, draw: random.Random) -> None:
    """Change letters and digits of texts: what is still text is checked by nobody else."""
    letters = [i for i, byte in enumerate(content) if byte < 128 and chr(byte).isalnum()]
    for i in draw.choices(letters, k=draw.choice((1, 3, 30))) if letters else ():
        content[i] = draw.choice(b'0129azAZ"{}[],:-.\xff\x00')


def cut(content: bytearray, draw: random.Random) -> None:
    """Drop the end."""
    del content[draw.randrange(len(content)) :]


def zero(content: bytearray, draw: random.Random) -> None:
    """Zero some pages."""
    for _ in range(draw.choice((1, 1, 3))):
        page = PAGE * draw.randrange(-(-len(content) // PAGE))
        content[page : page + PAGE] = bytes(len(content[page : page + PAGE]))


def swap(content: bytearray, draw: random.Random) -> None:
    """Exchange two pages."""
    pages = range(0, len(content) - PAGE + 1, PAGE)
    if len(pages) > 1:
        a, b = draw.sample(pages, 2)
        first, second = content[a : a + PAGE], content[b : b + PAGE]
        content[a : a + PAGE], content[b : b + PAGE] = second, first


KINDS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip,
    flip,
    scribble,
    rewrite,
    rewrite,
    cut,
    zero,
    swap,
)


def damaged(files: dict[str, bytes], folder: Path, count: int, seed: int) -> Iterator[Path]:
    """Some damaged copies of a store, one after the other; each is gone when the next comes.

    Args:
        files: result of `files_of`.
        folder: for the copies; not there yet.
        count: number of copies.
        seed: equal seeds, equal damage.
    """
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        folder.mkdir()
        path = folder / f"{number}.sqlite"
        # The log is damaged in one of four; it is whole in one, and hides some of the damage then.
        case = draw.choice(("log", "file", "file alone", "file alone"))
        for end, content in files.items():
            if end and case == "file alone":
                continue
            changed = bytearray(content)
            if bool(end) == (case == "log"):
                draw.choice(KINDS)(changed, draw)
            Path(f"{path}{end}").write_bytes(changed)
        yield path
        shutil.rmtree(folder)
