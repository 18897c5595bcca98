"""Counters for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tuner.errors import StoreError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class Metrics:
    """Counters of one service.

    Args:
        tasks: function that returns the number of tasks of all jobs by state.
        entries: function that returns the number of served decisions.
        age_s: function that returns the age of the served data, seconds.
    """

    def __init__(
        self,
        tasks: Callable[[], Mapping[str, int]],
        entries: Callable[[], float],
        age_s: Callable[[], float],
    ) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "tuner_requests", "Requests", ("method", "route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "tuner_request_seconds",
            "Time to answer",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        lookups = Counter("tuner_lookups", "Lookups", ("result",), registry=self._registry)
        self._hits, self._misses = lookups.labels("hit"), lookups.labels("miss")
        Gauge("tuner_entries", "Decisions served", registry=self._registry).set_function(entries)
        Gauge(
            "tuner_table_age_seconds", "Since the store was asked", registry=self._registry
        ).set_function(age_s)
        self._registry.register(_Tasks(tasks))

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request. Unknown methods share one series."""
        method = method if method in _METHODS else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_lookups(self, hits: int, misses: int) -> None:
        """Count the answers of a batch."""
        self._hits.inc(hits)
        self._misses.inc(misses)

    def text(self) -> bytes:
        """Counters in Prometheus' text format."""
        return generate_latest(self._registry)


class _Tasks(Collector):
    def __init__(self, tasks: Callable[[], Mapping[str, int]]) -> None:
        self._tasks = tasks

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily("tuner_tasks", "Problems of jobs by state", labels=["state"])
        try:
            for state, count in self._tasks().items():
                family.add_metric([state], count)
        except StoreError:
            return  # The other numbers are worth having without this one.
        yield family

    def describe(self) -> list[GaugeMetricFamily]:
        return []
