"""The runners of a job, opened on this machine or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tuner.runners.choose import Machine, Runners
from tuner.runners.on_ray import Cluster


@contextmanager
def open_runners(machine: Machine, note: Callable[[str], None]) -> Iterator[Sequence[Runners]]:
    """The runners of one job, for each kind of GPU: of a machine one, of a cluster perhaps more.

    Raises:
        ConfigError: when the cluster is not there, or no node of it has the labels.
        BenchmarkError: when no GPU of the cluster can be used.
    """
    if machine.cluster is None:
        with Runners(machine, note) as runners:
            yield [runners]
        return
    with Cluster(machine.cluster, note) as cluster, ExitStack() as stack:
        yield [stack.enter_context(runners) for runners in cluster.runners(machine, note)]


@contextmanager
def open_creator(
    machine: Machine, note: Callable[[str], None]
) -> Iterator[Callable[[Machine, Callable[[str], None]], Runners]]:
    """Maker of a controller's runners, for machines with one kind of GPU.

    Raises:
        ConfigError: as `open_runners`; and when the cluster has several kinds.
        BenchmarkError: as `open_runners`.
    """
    if machine.cluster is None:
        yield Runners
        return
    with Cluster(machine.cluster, note) as cluster:
        cluster.only(machine, note)
        yield cluster.only
