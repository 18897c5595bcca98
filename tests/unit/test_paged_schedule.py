"""Splits of paged decoding: the time model, and the choice by it."""

from __future__ import annotations

import pytest

from benchmarks import paged_calls as paged
from benchmarks.paged_batches import Case, ratios, served
from tuner.families.fused_attention.paged_schedule import Decoding, best, coarse, expected_us
from tuner.hardware import DEFAULT_GPU


def decoding(tiles: int, longest: int, mean: int) -> Decoding:
    """One query of 32 heads on 8, D = 128, a tile for each of a sequence's KV heads."""
    sequences = tiles // 8
    return Decoding(128, 64, 2, 264, tiles, 32 * sequences, longest, mean, sequences * 4096)


@pytest.mark.parametrize(
    ("tiles", "longest", "mean", "splits"),
    [
        (8, 4096, 4096, range(12, 33)),  # one sequence: blocks for the whole chip
        (512, 4096, 4096, range(1, 2)),  # alike, and tiles enough
        (512, 14661, 3886, range(2, 9)),  # the longest must not outlast the others
        (8, 100, 100, range(1, 2)),  # as many splits as tiles of keys at most
        (136, 8191, 0, range(1, 2)),  # not known: 4096 keys a split
        (136, 16384, 0, range(2, 5)),
        (32, 4096, 0, range(4, 5)),  # or a block for each multiprocessor
        (8, 100, 0, range(1, 2)),
    ],
)
def test_splits_follow_lengths_and_places(
    tiles: int, longest: int, mean: int, splits: range
) -> None:
    count, combine = best(decoding(tiles, longest, mean))
    assert count in splits and (count > 1) == bool(combine)


@pytest.mark.parametrize("instance", (64, 128))
def test_one_sequence_is_combined_by_a_cluster(instance: int) -> None:
    """Where a cluster may be, and not of many tiles or few splits."""
    one = decoding(8, 8192, 8192)._replace(
        instance=instance, tile_n=8192 // instance, bytes_per_key=32 * instance
    )
    assert best(one) == (16, "cluster")
    assert best(one._replace(has_clusters=False))[1] == "kernel"
    assert best(one._replace(tiles=9))[1] == "kernel"
    assert best(one._replace(longest=1 << 17, mean=1 << 17))[1] == "kernel"
    graph = one._replace(longest=4096, mean=0)
    assert best(graph._replace(tiles=32, longest=8192, leaves_cluster=True)) == (6, "cluster")
    assert best(graph._replace(tiles=32, longest=8192))[1] == "kernel"


def test_nearly_equal_lengths_share_a_schedule() -> None:
    assert [coarse(size) for size in (0, 7, 15, 17, 4097, 4608)] == [0, 7, 15, 18, 4608, 4608]
    assert all(size <= coarse(size) <= 1.125 * size for size in range(1, 5000))


@pytest.mark.parametrize("tiles", [1, 8, 64, 300])
def test_times_grow_with_the_keys(tiles: int) -> None:
    for splits, combine in ((1, ""), (4, "cluster"), (16, "kernel")):
        times = [expected_us(decoding(8 * tiles, keys, keys), splits, combine)
                 for keys in (64, 512, 4096, 32768)]  # fmt: skip
        assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize("case", [*served(), *ratios()[::8]], ids=lambda case: case.label)
def test_batches_of_engines_have_kernels_that_read_each_key_once(case: Case) -> None:
    """And each has a legal schedule with the same compiled kernel."""
    packed = []
    for config, spec in paged.specs_of(case).items():
        packed.append(config.get("packed_heads", 1))
        schedules = list(paged.schedules(case, config))
        assert schedules, paged.short(config)
        assert all(
            paged.FAMILY.accepts(case.problem, schedule, DEFAULT_GPU) for schedule in schedules
        )
        (kernel,) = {paged.FAMILY.kernels(case.problem, each)["attention"] for each in schedules}
        assert kernel == spec
    assert max(packed) >= case.heads_q // case.heads_kv
