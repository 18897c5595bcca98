"""Why a configuration won: each claim follows from a number that was measured or computed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from shipped_recordings import FILES, read_once
from stored import final

from tuner import cli
from tuner.cli.explain import explanation_text
from tuner.config import Config
from tuner.families import families, families_of, family
from tuner.families.gemm import Gemm
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Clocks, Environment, Measurement, Regime, Resources
from tuner.problem import (
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)
from tuner.report import bounds
from tuner.report.bounds import Work, floors, works
from tuner.report.explain import COMPUTED, MEASURED, Explanation, explain
from tuner.report.subject import ReportSubject
from tuner.runners import recording
from tuner.runners.recording import Recording

GEMM = GemmProblem.parse("M=4096,N=4096,K=4096")
REGIME = Regime.default("gemm")
WIDE: dict[str, str | int | bool] = {
    "tile_m": 128,
    "tile_n": 256,
    "tile_k": 64,
    "cluster_m": 2,
    "cluster_n": 1,
    "kernel_schedule": "TmaWarpSpecializedCooperative",
    "epilogue_schedule": "TmaWarpSpecializedCooperative",
    "tile_scheduler": "Persistent",
    "raster_order": "AlongM",
    "max_swizzle_size": 1,
    "swap_ab": False,
}
ENVIRONMENT = Environment({"driver": "580"})


def gemm(**changes: str | int | bool) -> Config:
    return Config("gemm", {**WIDE, **changes})


def measured(
    config: Config, us: float, problem: Problem = GEMM, is_final: bool = False, registers: int = 168
) -> Measurement:
    facts = {"environment": ENVIRONMENT, "clocks": Clocks(1455), "is_final": is_final}
    facts["created_at"] = "2026-11-20T10:00:00+00:00"
    resources = {"gemm": Resources(registers, 0, 0, 0)}
    return final(config, us, problem, **facts, std_us=0.001 * us, resources=resources)


def subject(*found: Measurement) -> ReportSubject:
    first = found[0]
    recorded = Recording(first.problem, DEFAULT_GPU, first.regime, ENVIRONMENT, found)
    return ReportSubject(recorded, "a test")


def sample() -> ReportSubject:
    """The winner, a runner-up with smaller tiles, single changes and a vendor's kernel."""
    narrow = gemm(tile_n=128)
    return subject(
        measured(gemm(), 190.0),
        measured(narrow, 200.0, registers=90),
        measured(gemm(cluster_m=1), 195.0),
        measured(gemm(cluster_m=1, raster_order="AlongN"), 250.0),
        measured(gemm(), 210.0, is_final=True),
        measured(narrow, 230.0, is_final=True, registers=90),
        measured(Config("vendor_blas", {"kernel": "cublas"}), 215.0, is_final=True),
    )


def account(of: ReportSubject) -> Explanation:
    found = explain(of)
    assert found is not None
    return found


def test_the_runner_up_is_told_by_its_numbers() -> None:
    contrast = account(sample()).contrasts[0]
    assert contrast.changes == ("tile_n 256 instead of 128",)
    texts = {claim.text: claim.source for claim in contrast.claims}
    digest = gemm(tile_n=128).digest[:6]
    told = (
        f"gemm {digest} takes 230.0 us in the final pass, 9.5 % more than the 210.0 us of this one."
    )
    assert texts[told] == MEASURED
    told = "Registers: 168 a thread at launch, 0 bytes spilled, against 90 and 0 (gemm, by ptxas)."
    assert texts[told] == MEASURED
    told = (
        "Waves: 512 tiles on 132 places, 3.88 waves (97 % full), against "
        "1024 tiles on 132 places, 7.76 waves (97 % full)."
    )
    assert texts[told] == COMPUTED
    # 64 x 256 x 16 an instruction: (4096^3) / (64 * 256 * 16), twice as many at half the width.
    told = "Tensor-core instructions (WGMMA): 262 k against 524 k, -50 %."
    assert texts[told] == COMPUTED


def test_the_default_is_what_the_estimate_alone_would_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def narrow_first(self: Gemm, problem: Problem, config: Config, gpu: Gpu) -> float:
        return float(config["tile_n"])

    def wide_first(self: Gemm, problem: Problem, config: Config, gpu: Gpu) -> float:
        return -float(config["tile_n"] + config["cluster_m"])

    monkeypatch.setattr(Gemm, "predict_us", narrow_first)
    contrast = account(sample()).contrasts[1]
    assert contrast.title.endswith(f"would choose, gemm {gemm(tile_n=128).digest[:6]}")
    # Quick time against quick time: the final pass has other clocks.
    assert "200.0 us in the quick pass, 5.3 % more than the 190.0 us" in contrast.claims[0].text
    monkeypatch.setattr(Gemm, "predict_us", wide_first)
    contrast = account(sample()).contrasts[1]
    assert contrast.title == "Against the default"
    assert "would have chosen this configuration" in contrast.claims[0].text


def test_single_changes_are_measured_ones_only() -> None:
    texts = [claim.text for claim in account(sample()).single]
    assert texts == [
        "cluster_m 1 instead of 2: 195.0 us, 2.6 % slower in the quick pass (deviation 0.1 %).",
        "tile_n 128 instead of 256: 200.0 us, 5.3 % slower in the quick pass (deviation 0.1 %).",
    ]


def test_what_limits_a_kernel() -> None:
    # 4096^3 at 4096 operations a clock on 132 multiprocessors of 1455 MHz: 174.2 us.
    shares, verdict = (claim.text for claim in account(sample()).limits)
    assert "at 1455 MHz: tensor cores 83 %, special-function units 0 %" in shares
    assert verdict == (
        "Limited by: tensor cores. With the same work no more than 17 % could be gained."
    )
    slow = subject(measured(gemm(), 900.0, is_final=True))
    assert account(slow).limits[-1].text.startswith("Limited by no single unit; nearest: tensor")


def test_a_tie_is_called_one() -> None:
    tie = subject(
        measured(gemm(), 210.0, is_final=True), measured(gemm(cluster_m=1), 210.1, is_final=True)
    )
    assert "equal within the noise of the two" in account(tie).contrasts[0].claims[0].text


def test_equal_work_is_said_to_be_equal() -> None:
    of = subject(
        measured(gemm(), 210.0, is_final=True),
        measured(gemm(raster_order="AlongN"), 230.0, is_final=True),
    )
    assert account(of).contrasts[0].claims[-1].text.startswith("Waves, occupancy, bytes and")


def test_a_config_of_another_version_has_no_computed_claims() -> None:
    of = subject(
        measured(Config("gemm", {"tile_m": 1}), 210.0, is_final=True),
        measured(gemm(), 230.0, is_final=True),
    )
    assert [claim.source for claim in account(of).contrasts[0].claims] == [MEASURED]


def test_no_own_kernel_no_account() -> None:
    only = measured(Config("vendor_blas", {"kernel": "cublas"}), 215.0, is_final=True)
    assert explain(subject(only)) is None


class TestWork:
    """Numbers that can be counted by hand."""

    def one(self, problem: Problem, config: Config) -> Work:
        (found,) = works(problem, config, DEFAULT_GPU)
        return found

    def test_attention(self) -> None:
        params = {
            "warp_groups": 2,
            "tile_n": 128,
            "kv_stages": 2,
            "blocks_per_sm": 1,
            "ping_pong": True,
            "persistent": False,
        }
        config = Config("fused_attention", params)
        found = self.one(AttentionProblem.parse("S=1024,D=64"), config)
        assert (found.tiles, found.slots, found.threads) == (16 * 8, 132, 384)
        assert found.waves == pytest.approx(128 / 132)
        assert found.occupancy == 12 / 64
        assert found.tensor_flops == 4 * 16 * 1024 * 1024 * 64
        assert found.exponentials == 16 * 1024 * 1024
        # 8 visits of a K and a V tile of 128 x 64 fp16 a query tile; Q and the output once.
        assert found.l2_bytes == 128 * 8 * 2 * 128 * 64 * 2 + 2 * 16 * 1024 * 64 * 2
        causal = self.one(AttentionProblem.parse("S=1024,D=64,causal=1"), config)
        assert causal.exponentials == found.exponentials * 36 / 64  # 1 + 2 + ... + 8 of 64 tiles
        assert not causal.is_even
        split = Config("fused_attention", {**params, "splits": 2})
        assert self.one(AttentionProblem.parse("S=1024,D=64"), split).tiles == 2 * found.tiles

    def test_packed_heads_share_their_keys(self) -> None:
        problem = AttentionProblem.parse("SQ=1,SKV=1024,H=32,HKV=8,D=128")
        params = {"warp_groups": 1, "tile_n": 64, "kv_stages": 2, "persistent": False}
        apart = self.one(problem, Config("fused_attention", params))
        packed = self.one(problem, Config("fused_attention", {**params, "packed_heads": 4}))
        assert (apart.tiles, packed.tiles) == (32, 8)
        assert apart.tensor_flops == 4 * packed.tensor_flops

    def test_multicast_saves_reads(self) -> None:
        alone, pair = self.one(GEMM, gemm(cluster_m=1)), self.one(GEMM, gemm())
        reads = 2 * (128 + 256) * 4096 * 512
        assert alone.l2_bytes == reads + GEMM.output.bytes
        assert pair.l2_bytes == 2 * (128 + 128) * 4096 * 512 + GEMM.output.bytes

    def test_clusters_divide_the_sum(self) -> None:
        params = {"swap_ab": True, "tile_m": 128, "tile_n": 16, "stages": 8, "split_k": 4}
        config = Config("cluster_gemm", {**params, "blocks_per_sm": 1})
        found = self.one(GemmProblem(16, 4096, 4096), config)
        assert (found.tiles, found.slots, found.threads) == (32 * 4, 132, 384)
        assert found.tensor_flops == 2 * 16 * 4096 * 4096
        # The weights once, all rows of A for each of 32 tiles, the output once.
        assert found.l2_bytes == 2 * (4096 * 4096 + 32 * 16 * 4096 + 16 * 4096)

    def test_few_rows(self) -> None:
        config = family("gemv").space(GemmProblem(4, 4096, 4096), DEFAULT_GPU)[0]
        params = {**config.params, "warps": 8, "k_warps": 8, "row_tiles": 2, "persistent": False}
        found = self.one(GemmProblem(4, 4096, 4096), Config("gemv", params))
        assert found.tiles == 4096 / 16
        assert found.tensor_flops == 2 * 16 * 4096 * 4096  # sixteen rows whatever M is
        # Every block reads A; the weights and the output once.
        assert found.l2_bytes == 256 * 4 * 4096 * 2 + 4096 * 4096 * 2 + 4 * 4096 * 2

    def test_softmax(self) -> None:
        problem = SoftmaxProblem(256, 512)
        params = {"threads_per_row": 32, "vector_width": 4, "rows_per_block": 4, "passes": 1}
        found = self.one(problem, Config("softmax", params))
        assert (found.tiles, found.threads) == (64, 128)
        assert found.exponentials == 256 * 512
        assert found.l2_bytes == 256 * 512 * (4 + 2)

    def test_three_kernels_in_chunks(self) -> None:
        problem = AttentionProblem.parse("S=256,D=64")
        member = family("three_kernel_attention")
        config = member.space(problem, DEFAULT_GPU)[0]
        heads = config["heads_per_launch"]
        found = works(problem, config, DEFAULT_GPU)
        assert [w.kernel for w in found] == ["qk", "softmax", "pv"]
        assert {w.launches for w in found} == {16 // heads}
        assert sum(w.launches for w in found) == len(member.launches(problem, config, 1.0))
        scores = 16 * 256 * 256
        assert bounds.total(found, "exponentials") in (scores, 2 * scores)

    def test_two_kernels_in_chunks(self) -> None:
        problem = AttentionProblem.parse("S=1024,D=192")
        member = family("two_kernel_attention")
        found_chunks = False
        for config in member.space(problem, DEFAULT_GPU):
            scores, output = works(problem, config, DEFAULT_GPU)
            assert (scores.kernel, output.kernel) == ("scores", "output")
            launches = len(member.launches(problem, config, 1.0))
            assert scores.launches + output.launches == launches
            found_chunks |= launches > 2
            elements = 16 * 1024 * 1024
            assert bounds.total([scores], "exponentials") == elements
            assert bounds.total([output], "exponentials") == 0
            assert bounds.total([output], "tensor_flops") == 2 * elements * 192
            # The probabilities are written once; both halves of the columns read them.
            assert bounds.total([scores], "l2_bytes") > 2 * elements
            assert bounds.total([output], "l2_bytes") > 2 * 2 * elements
        assert found_chunks

    def test_every_member_of_every_space_is_known(self) -> None:
        """Each own family's configs have their work, but for gradients of attention, latent
        attention, and kernels that are made of other families' (three kernels of attention).
        """
        problems: list[Problem] = [
            AttentionProblem.parse("S=1024,D=64,causal=1"),
            GEMM,
            GemmProblem(4, 4096, 4096),
            GemmProblem.parse("M=64,N=4096,K=4096,dtype=e4m3,scales=block"),
            SwigluProblem(256, 512, 256),
            GroupedGemmProblem.parse("G=4,M=256,N=512,K=512,dtype=bf16"),
            GroupedGemmProblem.parse("G=4,M=256,N=512,K=512,dtype=e4m3"),
            SoftmaxProblem(256, 512),
        ]
        known = set()
        for problem in problems:
            for name, member in families_of(problem.op).items():
                if member.is_vendor or member.stages(problem):
                    continue
                space = member.space(problem, DEFAULT_GPU)[::40]
                assert all(works(problem, config, DEFAULT_GPU) for config in space), name
                known |= {name} if space else set()
        own = {name for name, member in families().items() if not member.is_vendor}
        assert own - known == {"fused_attention_backward", "mla_decode", "three_kernel_attention"}

    def test_floors_lie_below_what_was_measured(self) -> None:
        measured = [m for path in FILES for m in read_once(path).measurements]
        timed = [m for m in measured if m.ok and m.is_final and m.latency_us]
        assert len(timed) > 1000
        for m in timed:
            found = works(m.problem, m.config, m.gpu)
            least = floors(m, m.gpu, found, m.clocks.sm_mhz or m.gpu.clock_max_mhz)
            assert m.latency_us and max(least.values()) <= m.latency_us, (m.problem, m.config)

    def test_memory_counts_what_the_l2_cannot_keep(self) -> None:
        assert bounds.memory_bytes(GEMM, DEFAULT_GPU, Regime("stream", "cold")) == GEMM.bytes
        beyond = GEMM.bytes - DEFAULT_GPU.l2_bytes
        assert bounds.memory_bytes(GEMM, DEFAULT_GPU, Regime("stream", "warm")) == beyond
        small = replace(GEMM, m=128)
        assert bounds.memory_bytes(small, DEFAULT_GPU, Regime("stream", "warm")) == 0


class TestCommand:
    """What `tuner explain` prints."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / f"one{recording.SUFFIX}"
        recording.write(path, sample().recording)
        return path

    def test_text(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["explain", "--recording", str(file)]) == 0
        out = capsys.readouterr().out
        assert "1.02x cublas (215.0 us, the one vendor's kernel measured)" in " ".join(out.split())
        assert "Changing one parameter alone" in out
        assert max(map(len, out.splitlines()[2:])) <= 100

    def test_json(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["explain", "--recording", str(file), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["config"] == gemm().to_json()
        sources = {claim["source"] for c in document["contrasts"] for claim in c["claims"]}
        assert sources == {MEASURED, COMPUTED}

    def test_without_an_own_kernel(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / f"one{recording.SUFFIX}"
        only = measured(Config("vendor_blas", {"kernel": "cublas"}), 215.0, is_final=True)
        recording.write(path, subject(only).recording)
        assert cli.main(["explain", "--recording", str(path)]) == 1
        assert "no own kernel passed for gemm M=4096" in capsys.readouterr().err

    def test_a_shape_needs_to_be_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            cli.main(["explain"])
        assert "one of the arguments --shape --recording is required" in capsys.readouterr().err

    def test_the_text_says_where_numbers_come_from(self) -> None:
        text = explanation_text(sample(), account(sample()))
        assert text.startswith(
            "gemm M=4096,N=4096,K=4096,dtype=fp16 on NVIDIA H200, stream-cold: measured 2026-11-20"
        )
        assert text.count("[measured]") + text.count("[computed]") == sum(
            len(c.claims) for c in account(sample()).contrasts
        ) + len(account(sample()).single) + len(account(sample()).limits)
