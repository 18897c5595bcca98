from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from tuner import artifacts
from tuner.artifacts import Artifact, ArtifactCache, LoadedKernel, load
from tuner.errors import BenchmarkError, StoreError
from tuner.measurement import Resources

USED = Resources(168, 0, 4, 8, 1024)


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


def put(cache: ArtifactCache, key: str, content: bytes = b"library") -> Artifact:
    with cache.workspace() as folder:
        library = folder / "built.so"
        library.write_bytes(content)
        return cache.put(
            key, library, resources=USED, compile_cpu_s=1.5, source="// cu", facts={"n": 1}
        )


def age(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder / "meta.json", (then, then))


def hidden(cache: ArtifactCache, name: str) -> list[Path]:
    folder = cache.root / name
    return sorted(folder.iterdir()) if folder.exists() else []


def test_what_is_put_is_found_by_another_cache(cache: ArtifactCache) -> None:
    made = put(cache, "k1")
    found = ArtifactCache(cache.root).find("k1")
    assert found == made
    assert found is not None
    assert (found.resources, found.compile_cpu_s, found.facts) == (USED, 1.5, {"n": 1})
    assert found.library.read_bytes() == b"library"
    assert (cache.root / "k1" / "kernel.cu").read_text() == "// cu"
    assert hidden(cache, ".building") == []


def test_a_miss_is_none_and_makes_nothing(cache: ArtifactCache) -> None:
    assert cache.find("k1") is None
    assert cache.keys() == []
    assert cache.total_bytes() == 0
    assert not cache.root.exists()


def test_kernels_of_one_unit_share_the_library(cache: ArtifactCache) -> None:
    with cache.workspace() as folder:
        library = folder / "built.so"
        library.write_bytes(bytes(10_000))
        made = [
            cache.put(k, library, resources=None, compile_cpu_s=0, source="", facts={})
            for k in ("k1", "k2", "k3")
        ]
    assert len({a.library.stat().st_ino for a in made}) == 1
    assert 10_000 < cache.total_bytes() < 13_000


def test_a_library_is_copied_where_links_are_refused(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert put(cache, "k1").library.read_bytes() == b"library"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("kernel.so", b"librarx"),
        ("kernel.so", b""),
        ("meta.json", b'{"format": 1, "sha'),
        ("meta.json", b"[]"),
        ("meta.json", b"\xff\xfe"),
        ("meta.json", b'{"format": 99}'),
        ("kernel.so", None),
        ("meta.json", None),
    ],
)
def test_what_is_corrupt_is_quarantined_and_counts_as_a_miss(
    cache: ArtifactCache, file: str, content: bytes | None
) -> None:
    put(cache, "k1")
    path = cache.root / "k1" / file
    path.unlink()  # not in place: the mtime must not decide
    if content is not None:
        path.write_bytes(content)
    assert cache.find("k1") is None
    assert not (cache.root / "k1").exists()
    assert [p.name.split("-")[0] for p in hidden(cache, ".quarantine")] == ["k1"]
    assert put(cache, "k1").library.read_bytes() == b"library"


def test_a_library_is_hashed_once_per_state(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, "k1")
    fresh = ArtifactCache(cache.root)
    hashed = []
    real = artifacts._sha256
    monkeypatch.setattr(artifacts, "_sha256", lambda path: hashed.append(path) or real(path))
    for _ in range(3):
        assert fresh.find("k1") is not None
    assert len(hashed) == 1
    os.utime(cache.root / "k1" / "kernel.so", (1, 1))
    assert fresh.find("k1") is not None
    assert len(hashed) == 2


def test_putting_a_key_again_keeps_the_good_one_and_replaces_a_bad_one(
    cache: ArtifactCache,
) -> None:
    put(cache, "k1", b"first")
    assert put(cache, "k1", b"second").library.read_bytes() == b"first"
    library = cache.root / "k1" / "kernel.so"
    library.unlink()
    library.write_bytes(b"damaged")
    assert put(cache, "k1", b"third").library.read_bytes() == b"third"


def test_prune_removes_the_least_recently_used(cache: ArtifactCache) -> None:
    for i, key in enumerate(("old", "used", "new")):
        put(cache, key, bytes([i]) * 10_000)
        age(cache.root / key, 1000 - i)
    assert cache.find("old") is not None  # now the most recently used
    age(cache.root / "old", 500)
    removed, freed = cache.prune(25_000)
    assert removed == 1
    assert freed > 10_000
    assert cache.keys() == ["new", "old"]
    assert cache.total_bytes() <= 25_000
    assert hidden(cache, ".building") == hidden(cache, ".locks") == []


def test_finding_is_using(cache: ArtifactCache) -> None:
    put(cache, "k1")
    age(cache.root / "k1", 1000)
    cache.find("k1")
    assert time.time() - (cache.root / "k1" / "meta.json").stat().st_mtime < 100
    assert cache.prune(0) == (0, 0)


def test_prune_counts_what_hard_links_free(cache: ArtifactCache) -> None:
    with cache.workspace() as folder:
        library = folder / "built.so"
        library.write_bytes(bytes(100_000))
        for i, key in enumerate(("k1", "k2")):
            cache.put(key, library, resources=None, compile_cpu_s=0, source="", facts={})
            age(cache.root / key, 1000 - i)
    removed, freed = cache.prune(100_000)  # the first link frees next to nothing
    assert (removed, cache.keys()) == (2, [])
    assert freed > 100_000
    assert cache.total_bytes() == 0


def test_prune_leaves_the_young_and_the_locked(cache: ArtifactCache) -> None:
    put(cache, "young")
    put(cache, "locked")
    age(cache.root / "locked", 1000)
    with cache.lock("locked"):
        assert cache.prune(0) == (0, 0)
    assert cache.prune(0)[0] == 1
    assert cache.keys() == ["young"]


def test_prune_takes_the_quarantine_first(cache: ArtifactCache) -> None:
    put(cache, "bad")
    (cache.root / "bad" / "kernel.so").unlink()
    assert cache.find("bad") is None
    put(cache, "good")
    for folder in (*hidden(cache, ".quarantine"), cache.root / "good"):
        age(folder, 1000)
    assert cache.prune(cache.total_bytes() - 1)[0] == 1
    assert cache.keys() == ["good"]
    assert hidden(cache, ".quarantine") == []


def test_a_lock_excludes_other_threads(cache: ArtifactCache) -> None:
    inside, most = 0, 0

    def enter() -> None:
        nonlocal inside, most
        for _ in range(5):
            with cache.lock("k1") as held:
                assert held
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert hidden(cache, ".locks") == []


def _hold(root: Path, held: object, release: object) -> None:
    with ArtifactCache(root).lock("k1"):
        held.set()  # type: ignore[attr-defined]
        release.wait()  # type: ignore[attr-defined]


def test_a_lock_excludes_other_processes_and_ends_with_them(cache: ArtifactCache) -> None:
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(cache.root, held, release))
    process.start()
    assert held.wait(30)
    assert cache._try_lock("k1") is None
    process.kill()
    process.join()
    with cache.lock("k1") as mine:
        assert mine


def test_waiting_for_a_lock_can_be_stopped(cache: ArtifactCache) -> None:
    stop = threading.Event()
    with cache.lock("k1"):
        threading.Timer(0.1, stop.set).start()
        with cache.lock("k1", stop) as held:
            assert not held
    assert hidden(cache, ".locks") == []


def test_leftovers_of_dead_processes_are_swept(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = cache.root / ".building" / "dead"
    dead.mkdir(parents=True)
    (dead / "unit.cu").write_text("x")
    with cache.workspace() as alive:
        cache.sweep()
        assert dead.exists()  # too young to tell
        monkeypatch.setattr(artifacts, "_SWEEP_AGE_S", -1.0)
        cache.sweep()
        assert not dead.exists()
        assert alive.exists()


def test_a_cache_that_cannot_be_written_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = ArtifactCache(tmp_path / "file" / "cache")
    assert cache.find("k1") is None
    for attempt in (lambda: put(cache, "k1"), lambda: cache.lock("k1").__enter__()):
        with pytest.raises(StoreError, match=r"cannot be written \(Not a directory\).*TUNER_CACHE"):
            attempt()


def test_a_full_disk_says_so_and_leaves_nothing(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifacts, "_fsync", full)
    with pytest.raises(StoreError, match=r"is full: free some space, 'tuner cache prune"):
        put(cache, "k1")
    assert cache.keys() == []
    assert hidden(cache, ".building") == []


def test_a_library_that_cannot_be_loaded_is_a_benchmark_error(cache: ArtifactCache) -> None:
    with pytest.raises(BenchmarkError, match="kernel k1 cannot be loaded"):
        load(put(cache, "k1"))
    libc = Path("libc.so.6")
    with pytest.raises(BenchmarkError, match="tuner_k2_workspace"):
        load(Artifact("k2", libc, "", None, 0.0))


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        (-5, "launch_error", r"cutlass::Status 5 \(kErrorNotSupported\)"),
        (2, "out_of_memory", "cudaError 2"),
        (700, "illegal_access", "cudaError 700"),
        (9, "launch_error", "cudaError 9"),
    ],
)
def test_a_refused_launch_says_who_refused(code: int, status: str, message: str) -> None:
    kernel = LoadedKernel.__new__(LoadedKernel)
    kernel.key = "k1"
    kernel._launch = lambda *_: code
    with pytest.raises(BenchmarkError, match=f"launch of k1: {message}") as raised:
        kernel.launch([1, 2], [3], [0.5], 0, 0)
    assert raised.value.status == status


def test_launch_passes_its_arguments_in_c_types() -> None:
    kernel = LoadedKernel.__new__(LoadedKernel)
    kernel.key = "k1"
    seen: list[list[float]] = []
    kernel._launch = lambda *a: seen.append([list(a[0]), list(a[1]), list(a[2]), a[3], a[4]]) or 0
    kernel.launch([1 << 47, 16], [-3, 1 << 40], [0.125], 64, 7)
    assert seen == [[[1 << 47, 16], [-3, 1 << 40], [0.125], 64, 7]]
