"""Bundles: what is packed, that it arrives whole, and that nothing else gets in."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from bundle_machines import (
    H200,
    KEYS,
    LIBRARY,
    OTHER,
    PROBLEM,
    RANKING,
    SPACE,
    WARM,
    Machine,
    maker_fixture,
    measured,
    nothing_shipped_fixture,
    packed_fixture,
    user_fixture,
)

from tuner.bundle import pack
from tuner.cli import main
from tuner.errors import NoValidConfigError, StoreError
from tuner.measurement import Resources
from tuner.problem import GemmProblem, SoftmaxProblem
from tuner.selection.reader import lookup

nothing_shipped = nothing_shipped_fixture  # for every test here
maker = maker_fixture
user = user_fixture
packed = packed_fixture


class TestRoundTrip:
    def test_what_was_packed_serves_elsewhere(self, packed: Path, user: Machine) -> None:
        done = user.install(packed)
        assert (done.kernels_added, done.report.entries_added) == (2, 1)
        answer = lookup(PROBLEM, gpu=H200, path=user.path)
        assert answer.candidates == RANKING
        assert answer.entry.origin == "bundle"
        found = [user.cache.find(key) for key in KEYS]
        assert all(a is not None and a.library.read_bytes() == LIBRARY for a in found)
        assert found[0] is not None
        assert (found[0].resources, found[0].compile_cpu_s) == (Resources(32, 0, 0, 0), 1.5)

    def test_a_second_time_nothing_is_new(self, packed: Path, user: Machine) -> None:
        user.install(packed)
        before = user.content
        done = user.install(packed)
        assert (done.kernels_added, done.kernels_known, done.report.entries_known) == (0, 2, 1)
        assert user.content == before

    def test_equal_content_equal_file(self, maker: Machine, tmp_path: Path) -> None:
        files = [tmp_path / name for name in ("one.tar", "two.tar")]
        for file in files:
            done = pack(maker.store.entries(), maker.cache, file)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert done.sha256 == hashlib.sha256(files[0].read_bytes()).hexdigest()

    def test_a_library_is_packed_once(self, packed: Path) -> None:
        with tarfile.open(packed) as tar:
            names = tar.getnames()
        assert names[0] == "manifest.json"
        assert len([name for name in names if name.startswith("libraries/")]) == 1

    def test_a_pin_comes_along(self, maker: Machine, user: Machine, tmp_path: Path) -> None:
        maker.store.pin(PROBLEM, H200, WARM, OTHER)
        out = tmp_path / "pinned.tar"
        pack(maker.store.entries(), maker.cache, out)
        user.install(out)
        (entry,) = user.store.entries()
        assert (entry.pinned, entry.winner.config) == (True, OTHER)

    def test_an_imported_entry_gets_its_kernels(
        self, maker: Machine, user: Machine, tmp_path: Path
    ) -> None:
        """Built at the maker's under another key than the one that was measured with."""
        user.store.import_(maker.store.export())
        built = RANKING[0].but(artifacts={"softmax": "c" * 32})
        maker.build(built)
        maker.store.record_build(PROBLEM, SPACE[0], built.artifacts)
        out = tmp_path / "built.tar"
        pack(maker.store.entries(), maker.cache, out)
        user.install(out)
        answer = lookup(PROBLEM, gpu=H200, path=user.path)
        assert answer.candidates[0].artifacts == built.artifacts

    def test_the_users_own_decision_stands(self, packed: Path, user: Machine) -> None:
        mine = (measured(OTHER, 4.0, "d" * 32),)
        user.store.decide(PROBLEM, H200, WARM, mine, "mine")
        user.build(mine[0])
        done = user.install(packed)
        assert len(done.report.entries_kept) == 1
        (entry,) = user.store.entries()
        assert entry.ranking == mine


class TestPacking:
    def test_a_kernel_that_is_not_here(self, maker: Machine, tmp_path: Path) -> None:
        maker.cache.remove(KEYS[0])
        with pytest.raises(
            NoValidConfigError, match=r"not in the cache: `tuner build --op softmax"
        ):
            pack(maker.store.entries(), maker.cache, tmp_path / "b.tar")
        assert not (tmp_path / "b.tar").exists()

    def test_a_kernel_that_is_not_needed_may_be_missing(
        self, maker: Machine, user: Machine, tmp_path: Path
    ) -> None:
        maker.cache.remove(KEYS[1])
        done = pack(maker.store.entries(), maker.cache, tmp_path / "b.tar")
        assert done.kernels == 1
        assert user.install(tmp_path / "b.tar").kernels_added == 1

    def test_a_kernel_of_other_templates(self, maker: Machine, tmp_path: Path) -> None:
        maker.cache.remove(KEYS[0])
        maker.build(RANKING[0], source="// of an older version")
        with pytest.raises(NoValidConfigError, match="of other templates"):
            pack(maker.store.entries(), maker.cache, tmp_path / "b.tar")

    def test_a_folder_that_is_not_there(self, maker: Machine, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="cannot be written"):
            pack(maker.store.entries(), maker.cache, tmp_path / "no" / "b.tar")


def full(*_: Any, **__: Any) -> None:
    raise StoreError("the disk is full")


class TestNothingHalfInstalled:
    def test_the_store_fails(
        self, packed: Path, user: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(user.store, "import_", full)
        with pytest.raises(StoreError, match="the disk is full"):
            user.install(packed)
        assert user.content == ([], [], 0)

    def test_the_cache_fails_at_the_second_kernel(
        self, packed: Path, user: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put = user.cache.put

        def fail(key: str, *rest: Any, **facts: Any) -> Any:
            return full() if key == KEYS[1] else put(key, *rest, **facts)

        monkeypatch.setattr(user.cache, "put", fail)
        with pytest.raises(StoreError, match="the disk is full"):
            user.install(packed)
        assert user.content == ([], [], 0)

    def test_kernels_that_were_there_stay(
        self, packed: Path, user: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        user.build(RANKING[0])
        monkeypatch.setattr(user.store, "import_", full)
        with pytest.raises(StoreError):
            user.install(packed)
        assert user.cache.keys() == [KEYS[0]]


def command(maker: Machine, *arguments: str) -> int:
    try:
        return main(["bundle", *arguments, "--store", str(maker.path)])
    except SystemExit as exc:
        return int(str(exc.code))


def decide_without_kernels(maker: Machine, *problems: SoftmaxProblem) -> None:
    for problem in problems:
        lone = measured(SPACE[0], 3.0, "9" * 32, problem=problem)
        maker.store.decide(problem, H200, WARM, [lone], "sweep")


class TestCommand:
    @pytest.fixture(autouse=True)
    def cache(self, maker: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TUNER_CACHE_DIR", str(maker.path.parent))

    def test_pack_and_install(
        self, maker: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "b.tar"
        assert command(maker, str(out), "--all", "--json") == 0
        done = json.loads(capsys.readouterr().out)
        assert (done["entries"], done["kernels"], done["bytes"]) == (1, 2, out.stat().st_size)
        assert command(maker, "install", str(out), "--sha256", done["sha256"]) == 0
        assert "1 known already" in capsys.readouterr().out

    def test_what_is_left_out_is_said(
        self, maker: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        decide_without_kernels(maker, SoftmaxProblem(64, 1024))
        assert command(maker, str(tmp_path / "b.tar"), "--all") == 0
        said = capsys.readouterr()
        assert "left out: softmax M=64" in said.err
        assert "1 entry with 2 kernels" in said.out
        shape = ("--op", "softmax", "--shape", "M=64,N=1024")
        assert command(maker, str(tmp_path / "c.tar"), *shape) == 1
        assert "is not in the cache" in capsys.readouterr().err

    def test_of_many_that_are_left_out_the_first_are_named_and_the_rest_counted(
        self, maker: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        decide_without_kernels(maker, *(SoftmaxProblem(64 * rows, 1024) for rows in range(1, 20)))
        assert command(maker, str(tmp_path / "b.tar"), "--all") == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 4 and lines[-1] == "left out: 16 more (all of them: --json)"

    def test_of_many_without_kernels_one_is_named(
        self, maker: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for key in KEYS:
            maker.cache.remove(key)
        decide_without_kernels(maker, *(SoftmaxProblem(64 * rows, 512) for rows in range(1, 20)))
        assert command(maker, str(tmp_path / "b.tar"), "--all") == 1
        err = capsys.readouterr().err
        assert "nothing is built of 20 entries (`tuner build` makes all), as softmax M=" in err
        assert err.count("is not in the cache") == 1

    def test_only_entries_in_use_are_packed_whose_kernels_build_makes(
        self, maker: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        chained = measured(SPACE[0], 3.0, "9" * 32, regime=WARM.chained)
        maker.store.decide(PROBLEM, H200, WARM.chained, [chained], "sweep")
        shape = ("--op", PROBLEM.op, "--shape", PROBLEM.label())
        assert command(maker, str(tmp_path / "b.tar"), *shape) == 0
        assert "1 entry with 2 kernels" in capsys.readouterr().out

    def test_only_the_operation_that_is_named_is_packed(
        self, maker: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lone = measured(SPACE[0], 3.0, "9" * 32, problem=(other := GemmProblem(64, 64, 64)))
        maker.store.decide(other, H200, WARM, [lone], "sweep")
        out = str(tmp_path / "b.tar")
        assert command(maker, out, "--all", "--op", "softmax", "--json") == 0
        done = json.loads(capsys.readouterr().out)
        assert (done["entries"], done["left_out"]) == (1, [])
        assert command(maker, out, "--all", "--op", "swiglu", "--gpu", "H200") == 1
        assert "nothing is measured for swiglu" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["b.tar"],
            ["b.tar", "c.tar", "--all"],
            ["b.tar", "--all", "--sha256", "0" * 64],
            ["b.tar", "--all", "--shape", "M=1,N=1"],
            ["b.tar", "--op", "softmax", "--shape", "M=0,N=1"],
            ["b.tar", "--all", "--gpu", "TPU"],
            ["install"],
            ["install", "a", "b"],
            ["install", "a", "--all"],
            ["install", "a", "--op", "gemm"],
            ["install", "a", "--sha256", "abc"],
            ["install", "/nonexistent/b.tar"],
        ],
    )
    def test_wrong_input_is_one_line(
        self, maker: Machine, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command(maker, *arguments) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
