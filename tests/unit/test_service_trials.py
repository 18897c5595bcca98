"""The service's pages of trials, kernels, comparisons and the report."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

from pages_client import (
    HOSTILE,
    OWN,
    Text,
    client_fixture,
    quick,
    show,
)
from serving import PROBLEM, SHAPE, decide, eventually, measured, served_store
from starlette.testclient import TestClient

from tuner.hardware import GPUS
from tuner.measurement import Environment, Provenance, Regime, Resources, Status
from tuner.problem import AttentionProblem
from tuner.service.pages import environments, trials
from tuner.store import Store

store = served_store
client = client_fixture


class TestTrials:
    @pytest.mark.parametrize(
        ("kind", "headline"),
        [
            (Provenance.MEASURED, "own speed 1.33x cudnn."),
            (Provenance.REPLAYED, "REPLAYED: softmax {} won the recorded final pass with 9.00 us"),
            (Provenance.PREDICTED, "PREDICTED: softmax {} has the shortest estimate, 9.00 us"),
        ],
    )
    def test_a_headline_says_where_its_time_is_from(
        self, client: TestClient, store: Store, kind: Provenance, headline: str
    ) -> None:
        facts = {"provenance": kind, "sweep": "x"}
        store.add([measured(9.0, config=OWN, **facts), measured(**facts)])
        said = show(client, "/trials", shape=SHAPE, sweep="x").said
        assert headline.format(OWN.digest[:6]) in said
        assert ("won the final pass" in said) is (kind is Provenance.MEASURED)
        kernel = show(client, "/kernel", shape=SHAPE, config=OWN.digest).said
        assert (f"{str(kind).upper()}: 9.00 us" in kernel) is (kind is not Provenance.MEASURED)

    def test_a_replay_of_the_quick_pass_says_so(self, client: TestClient, store: Store) -> None:
        facts = {"provenance": Provenance.REPLAYED, "sweep": "x", "is_final": False}
        older = measured(8.0, **{**facts, "is_final": True, "flags": ("quick",)})
        store.add([measured(15.0, config=OWN, **facts), measured(**facts), older])
        said = show(client, "/trials", shape=SHAPE, sweep="x").said
        assert f"REPLAYED: Fastest of the quick pass: softmax {OWN.digest[:6]} with 15.0 us" in said
        assert "own speed 0.80x cudnn, slower in the quick pass. No final pass." in said

    def test_time_over_trial_and_failures_by_reason(self, client: TestClient, store: Store) -> None:
        log = f"{HOSTILE}\nmore"
        failing = [quick(n, None, log=log) for n in (3, 4)]
        other = quick(5, None, status=Status.WRONG_RESULT, log="off by one")
        store.add([quick(1, 14.0), quick(2, 13.0), *failing, other])
        page = show(client, "/trials", shape=SHAPE)
        assert "13.0 us. No final pass yet." in page.said
        assert "5 of the quick pass, 3 failed" in page.said
        assert f"compile error 2 {HOSTILE} softmax" in page.said
        assert page.said.index("compile error 2") < page.said.index("wrong result 1 off by one")
        assert not [tag for tag in page.tags if tag[0] == "script" and not tag[1]]

    def test_runs_are_kept_apart(self, store: Store) -> None:
        changes = [
            {"sweep": "t"},
            {"regime": Regime("eager", "warm")},
            {"provenance": Provenance.REPLAYED},
            {"environment": Environment({"driver": "590"})},
        ]
        store.add([quick(1, 14.0), *(quick(1, 12.0, **change) for change in changes)])
        found = [run for run in trials.runs(store, PROBLEM) if run.quick]
        assert [len(run.measurements) for run in found] == [1] * 5
        assert len({run.key for run in found}) == 5
        assert all(trials.choose(found, key=run.key) is run for run in found)
        first = trials.choose(found, sweep="t")
        assert first.sweep == "t"
        eager = trials.choose(found, regimes=[Regime("eager", "warm")])
        assert eager.regime.launch == "eager"
        only = [run for run in found if run.provenance is Provenance.REPLAYED]
        assert trials.choose(only) is only[0]
        assert trials.choose(found, gpu="NVIDIA H100") is None

    def test_the_best_so_far(self, store: Store) -> None:
        store.add([quick(1, 14.0), quick(2, None), quick(3, 15.0), quick(4, 13.0)])
        (run,) = (run for run in trials.runs(store, PROBLEM) if run.quick)
        assert [step.best_us for step in run.steps] == [14.0, 14.0, 14.0, 13.0]
        assert run.picture is not None
        store.forget(PROBLEM)
        store.add([quick(2, None)])
        (run,) = trials.runs(store, PROBLEM)
        assert (run.picture, run.best, run.entry) == (None, None, None)

    def test_replayed_trials_keep_the_order_of_the_search(self, store: Store) -> None:
        """Their times are those of the recording."""
        changes = {"provenance": Provenance.REPLAYED, "sweep": "r"}
        store.add([quick(number, 20.0 - number, **changes) for number in (5, 1, 3)])
        run = trials.choose(trials.runs(store, PROBLEM), sweep="r")
        assert [step.best_us for step in run.steps] == [15.0, 15.0, 15.0]
        store.add([quick(5, 15.0, **{**changes, "sweep": "later"})])
        newest = trials.runs(store, PROBLEM)[0]
        assert newest.sweep == "later"

    def test_what_ships_is_shown_too(self, client: TestClient) -> None:
        page = show(client, "/trials", shape="S=1024,D=64")
        assert "from the shipped recording" in page.said
        assert "fused_attention" in page.said

    def test_a_problem_of_a_job_shows_its_own_sweep(self, client: TestClient, store: Store) -> None:
        id = store.jobs.submit([PROBLEM], {})
        before = show(client, "/trials", shape=SHAPE, job=id)
        assert "Nothing was measured yet." in before.said
        claim = store.jobs.claim("host:1")
        store.jobs.begin(claim.lease, "s")
        store.add([quick(1, 11.5)])
        page = show(client, "/trials", shape=SHAPE, job=id)
        assert "11.5 us" in page.said
        assert ("body", {"data-events": f"/v1/jobs/{id}/events"}) in page.tags
        show(client, "/trials", 404, shape="S=648,D=64", job=id)

    def test_a_problem_that_nobody_knows(self, client: TestClient) -> None:
        assert "Nothing was measured." in show(client, "/trials", shape="S=8,D=64").said


class TestKernel:
    def test_source_and_resources(self, client: TestClient) -> None:
        trial = show(client, "/trials", shape="S=1024,D=64")
        link = next(link for link in trial.links if link.startswith("/kernel"))
        page = show(client, link)
        assert "constexpr int kTileN = 128" in page.words
        assert "#include <cute/tensor.hpp>" in page.words
        assert "registers a thread" in page.said
        assert re.search(r"attention 128 0 B \+ 0 B 0 B 0 B not built here", page.said)

    def test_spills_and_artifacts(self, client: TestClient, store: Store) -> None:
        changes = {
            "resources": {"main": Resources(168, 4, 8, 16, 1024)},
            "artifacts": {"main": "ab" * 16},
        }
        store.add([quick(1, 12.0, **changes)])
        digest = quick(1, 12.0).config.digest
        said = show(client, "/kernel", shape=SHAPE, config=digest).said
        assert "main 168 4 B + 8 B 16 B 1.0 kB abababababababab" in said
        assert "This version of the program does not have this configuration." in said

    def test_a_vendors_kernel_has_no_source(self, client: TestClient) -> None:
        digest = measured().config.digest
        assert "it has no source here" in show(client, "/kernel", shape=SHAPE, config=digest).said

    def test_a_failure_shows_its_log(self, client: TestClient, store: Store) -> None:
        store.add([quick(1, None, log=f"first\n{HOSTILE}")])
        digest = quick(1, None).config.digest
        page = show(client, "/kernel", shape=SHAPE, config=digest)
        assert HOSTILE in page.words
        assert "Compile error on H200, stream-warm, for" in page.said

    def test_its_time_is_that_of_the_gpu_and_regime_it_was_come_from(
        self, client: TestClient, store: Store
    ) -> None:
        decide(store, measured(11.3, gpu=GPUS["H100"], created_at="2027-01-01T00:00:00+00:00"))
        decide(store, measured(19.0, regime=Regime("stream", "cold")))
        eventually(lambda: len(self.links(client)) == 3)
        headlines = [show(client, link).said.partition(", for ")[0] for link in self.links(client)]
        assert sorted(line.split(measured().config.digest + " ")[1] for line in headlines) == [
            "11.3 us on H100 80GB HBM3, stream-warm",
            "12.0 us on H200, stream-warm",
            "19.0 us on H200, stream-cold",
        ]

    def links(self, client: TestClient) -> list[str]:
        """Of the cache's rows of the problem to their kernels."""
        page = show(client, "/cache", q=SHAPE)
        return [link for link in page.links if link.startswith("/kernel")]

    def test_where_it_was_never_measured(self, client: TestClient) -> None:
        query = {"shape": SHAPE, "config": measured().config.digest}
        page = show(client, "/kernel", 404, **query, gpu="NVIDIA H100", l2="warm")
        assert "S=640,D=64,dtype=fp16 on NVIDIA H100, stream-warm" in page.said


class TestCompare:
    BEFORE, AFTER = Environment({"driver": "580"}), Environment({"driver": "590"})

    @pytest.fixture
    def updated(self, store: Store) -> Store:
        """PROBLEM became slower, OTHER was not measured again."""
        other = AttentionProblem.parse("S=704,D=64")
        decide(store, measured(20.0, other, sweep="a", created_at="2026-11-01T00:00:00+00:00"))
        new = {"environment": self.AFTER, "created_at": "2026-11-02T00:00:00+00:00"}
        decide(store, measured(13.0, sweep="b", **new))
        return store

    def test_two_environments(self, client: TestClient, updated: Store) -> None:
        digests = {"a": self.BEFORE.digest, "b": self.AFTER.digest}
        page = show(client, "/compare", **digests)
        assert "Of 1 problem in both, 0 became faster, 1 slower, 0 stayed the same." in page.said
        assert "driver 580 590" in page.said
        assert "12.0 13.0 ▲ 0.92x, slower" in page.said
        assert "Only before: 1 problem" in page.said
        chosen = [a["value"] for tag, a in page.tags if tag == "option" and "selected" in a]
        assert chosen == [self.BEFORE.digest, self.AFTER.digest]
        back = show(client, "/compare", a=digests["b"], b=digests["a"])
        assert "1 became faster, 0 slower" in back.said
        # The vendor's kernel is the only one: against itself nothing changed.
        assert "1 stayed the same" in show(client, "/compare", **digests, relative="true").said

    def test_older_passes_are_found_though_a_newer_one_decides(self, updated: Store) -> None:
        (before,) = (
            e for e in environments.entries_in(updated, self.BEFORE.digest) if e.problem == PROBLEM
        )
        assert before.winner.latency_us == 12.0
        (stored,) = updated.entries(problem=PROBLEM)
        assert stored.winner.latency_us == 13.0

    def test_of_one_environment_the_newest_pass_counts(self, store: Store) -> None:
        at = "2026-12-01T00:00:00+00:00"
        decide(store, measured(11.0, sweep="later", created_at=at))
        (entry,) = environments.entries_in(store, self.BEFORE.digest)
        assert entry.winner.latency_us == 11.0

    def test_what_cannot_be_compared(self, client: TestClient, updated: Store) -> None:
        shipped = next(one for one in environments.known(updated) if one.is_shipped).digest
        nothing = show(client, "/compare", a=self.BEFORE.digest, b=shipped)
        assert "have no problem, GPU and regime in common" in nothing.said
        same = show(client, "/compare", a=shipped, b=shipped)
        assert "These are the same environment." in same.said
        show(client, "/compare", 404, a="0" * 16, b=shipped)
        show(client, "/compare", 422, a=HOSTILE, b=shipped)


class TestReport:
    """From a verdict to why it is so."""

    def test_the_verdict_links_to_it(self, client: TestClient) -> None:
        page = show(client, "/trials", shape="S=1024,D=64", gpu="NVIDIA H200")
        link = next(link for link in page.links if link.startswith("/report?"))
        answer = client.get(link)
        assert answer.status_code == 200
        text = Text(answer.text).said
        assert "attention B=1,H=16,S=1024,D=64,dtype=fp16 on NVIDIA H200" in text
        assert "fused_attention b68d7d" in text
        assert "tuner build --shape B=1,H=16,S=1024,D=64,dtype=fp16" in text

    def test_its_scripts_reach_nothing(self, client: TestClient) -> None:
        answer = client.get("/report", params={"shape": SHAPE})
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("sandbox allow-scripts; default-src 'none'; ")
        assert "allow-same-origin" not in policy
        assert "connect-src" not in policy
        assert "frame-ancestors 'none'" in policy

    def test_what_was_not_measured_has_none(self, client: TestClient) -> None:
        text = show(client, "/report", status=404, shape="S=777,D=64").said
        assert "nothing was measured for attention B=1,H=16,S=777,D=64" in text
