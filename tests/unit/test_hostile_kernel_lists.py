"""Generated kernel lists: documents that were damaged or written by others, and long histories."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mutated import mutated

from tuner import settings
from tuner.base import resources
from tuner.compile.artifacts import ArtifactCache
from tuner.errors import ConfigError
from tuner.families.base import KernelSpec
from tuner.selection.kernel_list import Kernel, KernelList, Proof
from tuner.selection.kernels import Lists

NVCC, CAPABILITY = "13.0.88", "9.0"
TEMPLATE = "softmax.cu.j2"
SPECS = {f"k{number}": KernelSpec(TEMPLATE, {"tile": number}) for number in range(5)}
PROOF = Proof(64, 0, "NVIDIA H200", "580.1", "2026-11-25")


@pytest.fixture
def documents(tmp_path: Path) -> list[dict[str, Any]]:
    """A list of two proven kernels, a failed one, one without a verdict, and one that failed under
    another spec: of version 2 and of version 1. All libraries are in the cache.
    """
    cache, rows = ArtifactCache(), []
    for key, spec in SPECS.items():
        library = tmp_path / f"{key}.so"
        library.write_text(key)
        facts = {"nvcc": NVCC}
        made = cache.put(key, library, resources=None, compile_cpu_s=1, source="", facts=facts)
        source = resources.template_digest(TEMPLATE)
        rows.append(Kernel(spec.key, key, made.sha256, code=key * 16, source=source))
    proven = [replace(row, proof=PROOF) for row in rows]
    failed = [replace(rows[2], fault="wrong"), Kernel("other", "k4", "", fault="wrong")]
    known = KernelList(NVCC, "4.2.0", CAPABILITY)
    known = known.with_kernels([*proven[:2], failed[0], rows[3], proven[4], failed[1]])
    first = known.to_json()
    for row in first["kernels"]:
        row.setdefault("proof", None)
        row.setdefault("fault", "")
        row.pop("source", "")
        row.pop("code", "")
    del first["faults"]
    first |= {"version": 1, "templates": resources.templates_digest()}
    return [known.to_json(), first]


def allowed(text: bytes) -> set[str]:
    """Artifacts that a document may serve: with a proof of some problems, and without a failure."""
    data = json.loads(text)
    rows = data["kernels"]
    failed = {
        *data.get("faults", {}),
        *(str(row.get("artifact")) for row in rows if row.get("fault")),
    }
    return {
        str(row.get("artifact"))
        for row in rows
        if isinstance(row.get("proof"), dict)
        and type(problems := row["proof"].get("problems")) is int
        and problems > 0
        and str(row.get("artifact")) not in failed
        and str(row.get("code") or "") not in failed
    }


def served(lists: Lists) -> set[str]:
    answers = [lists.proven({"main": spec}, CAPABILITY) for spec in SPECS.values()]
    assert all(isinstance(answer, dict) or answer.isprintable() for answer in answers)
    return {answer["main"] for answer in answers if isinstance(answer, dict)}


def read(text: bytes, path: Path) -> None:
    """A list is refused in one line, or it is what it is written as."""
    path.write_bytes(text)
    try:
        known = KernelList.read(path)
    except ConfigError as exc:
        said = str(exc).removeprefix(f"kernel list {path}")
        assert "\n" not in said and len(said) < 500
    else:
        again = KernelList.from_json(json.loads(known.text()))
        assert again.kernels == known.kernels and again.faults.keys() == known.faults.keys()


def test_a_damaged_list_serves_nothing_that_it_does_not_prove(
    documents: list[dict[str, Any]], long_mode: bool
) -> None:
    path = settings.kernels_dir() / "list.json"
    path.parent.mkdir(parents=True)
    draw, serving = random.Random(43), 0
    for _ in range(30_000 if long_mode else 600):
        text = mutated(draw.choice(documents), draw)
        read(text, path)
        answers = served(Lists())
        assert not answers or answers <= allowed(text), text
        assert list(Lists().kernels(CAPABILITY)) is not None
        serving += bool(answers)
    assert serving > 100, "most changes leave some kernels"


def test_a_pipe_in_a_file_s_place_is_not_waited_for() -> None:
    """Which a member of a trusted group may make."""
    folder = settings.kernels_dir()
    folder.mkdir(parents=True)
    os.mkfifo(folder / "list.json")
    assert served(Lists()) == set()
    cache = ArtifactCache()
    (cache.root / "k0").mkdir(parents=True)
    os.mkfifo(cache.root / "k0" / "meta.json")
    assert cache.find("k0") is None and cache.facts("k0") == {}


def test_unchanged_it_serves_what_is_proven(documents: list[dict[str, Any]]) -> None:
    for data in documents:
        path = settings.kernels_dir() / "list.json"
        KernelList.from_json(data).write(path)
        assert served(Lists()) == allowed(json.dumps(data).encode()) == {"k0", "k1"}


Change = Callable[["History", random.Random], None]


class History:
    """A list over builds and verdicts, and what is known of its machine code besides."""

    CODES: Mapping[str, str] = {"a0": "A", "a1": "A", "b0": "B", "b1": "B", "c0": "C", "d0": "D"}
    """Machine code of each artifact."""
    SPECS = ("s", "t", "u")
    SHIPPED = tuple(Kernel("elsewhere", key, "", PROOF) for key in ("a0", "b0", "c0"))

    def __init__(self) -> None:
        self.known = KernelList(NVCC, "4.2.0", CAPABILITY)
        self.failed: dict[str, bool] = {}
        """By machine code: True when its last verdict on this machine is a failure."""
        self.ever_failed: set[str] = set()

    def build(self, draw: random.Random) -> None:
        key = draw.choice(sorted(self.CODES))
        kernel = Kernel(draw.choice(self.SPECS), key, draw.choice("xyz"), code=self.CODES[key])
        self.known = self.known.with_kernels([kernel]).with_verdicts(self.SHIPPED)

    def judge(self, draw: random.Random) -> None:
        if self.known.kernels:
            kernel = draw.choice(sorted(self.known.kernels.values(), key=lambda one: one.spec))
            is_failure = draw.random() < 0.4
            self.failed[kernel.code] = is_failure
            if is_failure:
                self.ever_failed.add(kernel.code)
                kernel = replace(kernel, proof=None, fault="wrong")
            else:
                kernel = replace(kernel, proof=PROOF, fault="")
            self.known = self.known.with_kernels([kernel])

    def adopt(self, draw: random.Random) -> None:
        key = draw.choice(sorted(self.CODES))
        kernel = Kernel("elsewhere", key, "", code=draw.choice(("", self.CODES[key])))
        is_failure = draw.random() < 0.1
        kernel = replace(kernel, **({"fault": "wrong"} if is_failure else {"proof": PROOF}))  # type: ignore[arg-type]
        if is_failure:
            self.ever_failed.add(self.CODES[key])
        self.known = self.known.with_verdicts([kernel])

    def forget(self, draw: random.Random) -> None:
        """Rows of another template go."""
        rows = {spec: one for spec, one in self.known.kernels.items() if draw.random() < 0.5}
        self.known = replace(self.known, kernels=rows)

    def write(self, draw: random.Random) -> None:
        again = KernelList.from_json(json.loads(self.known.text()))
        assert again == self.known
        self.known = again

    def check(self) -> None:
        for kernel in self.known.kernels.values():
            is_served = kernel.proof is not None and not kernel.fault
            assert not (is_served and self.failed.get(kernel.code)), "it failed, and is proven"
            assert not (kernel.fault and kernel.code not in self.ever_failed), "it never failed"


def test_no_history_serves_machine_code_that_failed_last(long_mode: bool) -> None:
    changes: list[Change] = [History.build, History.judge, History.adopt, History.forget]
    for seed in range(20_000 if long_mode else 400):
        draw, history = random.Random(seed), History()
        for _ in range(30):
            draw.choice([*changes, History.build, History.write])(history, draw)
            history.check()
