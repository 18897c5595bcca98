"""The mode of `tuner.deterministic`: one order of additions for a layer's calls, or an error."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.config import Config
from tuner.families import families
from tuner.families.by_operation import rule_of
from tuner.families.collective import COOPERATIVE
from tuner.families.invariance import ReductionClass
from tuner.hardware import DEFAULT_GPU
from tuner.problem import (
    E4M3,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SwigluProblem,
)
from tuner.selection import invariant
from tuner.selection.portfolio import shipped

LINEAR = GemmProblem(1, 4096, 4096, dtype="bfloat16")
PAGED = AttentionProblem.parse("B=1,H=32,HKV=8,S=1024,D=128,causal=1,dtype=bf16,page_size=64")
CUTLASS: dict[str, Any] = {
    **{"tile_m": 128, "tile_n": 128, "tile_k": 64, "cluster_m": 1, "cluster_n": 1},
    **{"kernel_schedule": COOPERATIVE, "epilogue_schedule": COOPERATIVE, "swap_ab": False},
    **{"tile_scheduler": "StreamK", "raster_order": "AlongN", "max_swizzle_size": 1},
}
LAYERS: dict[str, Any] = {
    "linear": LINEAR,
    "few columns": replace(LINEAR, n=1024, k=8192),
    "logits": replace(LINEAR, n=128256),
    "bias": replace(LINEAR, epilogue="bias"),
    "bias and GELU": replace(LINEAR, epilogue="bias_gelu_tanh"),
    "swiglu": SwigluProblem(1, 14336, 4096, dtype="bfloat16"),
    "blocks": GemmProblem(1, 4096, 7168, dtype=E4M3, scales="block"),
    "rows": GemmProblem(1, 4096, 4096, dtype=E4M3, scales="row"),
    "experts": GroupedGemmProblem(8, 1, 2048, 4096, dtype="bfloat16"),
    "experts of blocks": GroupedGemmProblem(8, 1, 2048, 4096, dtype=E4M3),
}


def portfolio_of(problem: Problem) -> Any:
    known = (one for one in shipped() if (one.op, one.gpu) == (problem.op, DEFAULT_GPU))
    return None if rule_of(problem) else next(known)


def chosen(problem: Problem) -> tuple[Config, ReductionClass]:
    selection = invariant.select(problem, DEFAULT_GPU, portfolio_of(problem))
    assert selection is not None, problem.label()
    found = {
        families()[config.family].reduction_class(problem, config)
        for _, config in selection.expected
    }
    (reduction,) = found
    assert reduction is not None
    assert all(
        families()[config.family].accepts(problem, config, DEFAULT_GPU)
        for _, config in selection.expected
    )
    assert [us for us, _ in selection.expected] == sorted(us for us, _ in selection.expected)
    return selection.expected[0][1], reduction


@pytest.mark.parametrize("name", LAYERS)
def test_every_number_of_rows_has_a_kernel_of_one_class(name: str) -> None:
    rows = (1, 2, 7, 8, 16, 17, 64, 100, 128, 256, 1000, 2048, 4096, 8192)
    kernels, classes = zip(*(chosen(replace(LAYERS[name], m=m)) for m in rows), strict=True)
    assert len(set(classes)) == 1
    assert len(set(kernels)) > 1, "few and many rows have kernels of their own"


def test_products_of_few_tiles_have_a_kernel_of_the_mode_alone() -> None:
    from tuner.families.gemm import undivided

    assert chosen(replace(LINEAR, m=128))[0] == undivided.KERNEL
    for other in (
        replace(LINEAR, m=8192),
        replace(LINEAR, m=128, epilogue="bias"),
        replace(LINEAR, m=128, dtype="float16", dtype_d="float16"),
    ):
        assert undivided.KERNEL not in {
            c for _, c in invariant.select(other, DEFAULT_GPU, portfolio_of(other)).expected
        }  # type: ignore[union-attr]


def test_narrow_layers_of_long_sums_divide_them_for_any_number_of_rows() -> None:
    few, many = (chosen(replace(LAYERS["few columns"], m=m)) for m in (1, 8192))
    assert few[1] == many[1] == ReductionClass(16, splits=8, step=64, merge="cluster")
    assert (few[0]["split_k"], many[0]["split_k"], many[0]["serial_parts"]) == (8, 1, 8)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("heads_kv", [8, 32])
def test_prompts_and_decoding_have_kernels_of_one_class(head_dim: int, heads_kv: int) -> None:
    base = AttentionProblem(1, 1, head_dim, 1, 32, heads_kv, dtype="bfloat16")
    calls = [
        replace(base, batch=batch, seqlen_q=queries, seqlen_kv=keys, is_causal=causal)
        for batch, queries, keys, causal in (
            *((1, 1, 100, False), (1, 1, 8192, False), (128, 1, 1024, False)),
            *((16, 5, 2048, False), (1, 4096, 4096, True), (64, 200, 200, True)),
            *((4, 1024, 1024, False), (1, 16, 16, True)),
        )
    ]
    assert len({chosen(call)[1] for call in calls}) == 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_chunks_and_decoding_over_pages_have_kernels_of_one_class(head_dim: int) -> None:
    sizes = ((1, 1, 8192), (128, 1, 1024), (16, 8, 2048), (1, 512, 4096), (4, 2048, 2048))
    sizes += ((1, 16, 256), (1, 256, 256), (1, 64, 1024), (8192, 1, 1024))
    calls = [
        replace(PAGED, head_dim=head_dim, batch=batch, seqlen_q=queries, seqlen_kv=keys)
        for batch, queries, keys in sizes
    ]
    assert len({chosen(call)[1] for call in calls}) == 1
    assert all(chosen(call)[0]["splits"] == 1 for call in calls)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [0, 64])
def test_blocks_share_the_parts_of_few_sequences(head_dim: int, page_size: int) -> None:
    """And each part has the same keys, of prompts and of any number of sequences."""

    def config(batch: int, queries: int, keys: int) -> Config:
        problem = replace(
            PAGED,
            batch=batch,
            seqlen_q=queries,
            seqlen_kv=keys,
            head_dim=head_dim,
            page_size=page_size,
            is_causal=page_size > 0 or queries > 64,
        )
        return chosen(problem)[0]

    few, many, prompts = config(1, 1, 8192), config(64, 1, 8192), config(2, 2048, 2048)
    assert {one["split_keys"] for one in (few, many, prompts)} == {512}
    assert few["combine"] == "kernel"
    assert "combine" not in many.params and "combine" not in prompts.params
    assert (few["warp_groups"], prompts["warp_groups"]) == (1, 3 if head_dim == 64 else 2)


@pytest.mark.parametrize(
    ("group", "packed"), [(1, 1), (2, 8), (3, 8), (4, 4), (7, 8), (8, 8), (12, 4)]
)
def test_decoding_reads_the_keys_once_for_up_to_eight_heads(group: int, packed: int) -> None:
    problem = replace(PAGED, heads_q=4 * group, heads_kv=4, batch=64, seqlen_q=1)
    config, reduction = chosen(problem)
    assert (config.get("packed_heads", 1), reduction.step) == (packed, 512)


def test_a_kernel_of_many_rows_serves_fewer_where_a_vendor_did() -> None:
    """Without the mode cuBLAS answers such products, so the domain has no kernel for them."""
    product = replace(LINEAR, m=256, n=6144)
    config, _ = chosen(product)
    assert config["tile_m"] * config["tile_n"] >= 128 * 64
    selection = invariant.select(product, DEFAULT_GPU, portfolio_of(product))
    narrow = next(us for us, other in selection.expected if other["tile_n"] <= 32)
    assert selection.expected[0][0] < narrow


def test_the_class_is_that_of_most_sizes_then_of_the_least_loss() -> None:
    narrow, wide, rare = (ReductionClass(depth) for depth in (8, 16, 32))
    times = [{narrow: 4.0, wide: 9.0, rare: 1.0}, {narrow: 4.0, wide: 1.0}]
    assert invariant._fastest(times) == narrow  # twice a factor of 4, wide once of 9
    assert invariant._fastest([{narrow: 2.0}, {narrow: 2.0, rare: 1.0}]) == narrow
    assert invariant._fastest([{}, {}]) is None


def test_layers_are_equal_for_calls_of_other_sizes() -> None:
    assert invariant.layer(LINEAR) == invariant.layer(replace(LINEAR, m=77))
    decoding = AttentionProblem.parse("B=7,H=8,SQ=1,SKV=999,D=64")
    prompt = AttentionProblem.parse("B=1,H=8,S=512,D=64,causal=1,layout=bshd")
    assert invariant.layer(decoding) == invariant.layer(prompt)
    assert invariant.layer(PAGED) == invariant.layer(replace(PAGED, seqlen_q=1, is_causal=False))
    other = replace(prompt, head_dim=128)
    assert invariant.layer(other) != invariant.layer(prompt)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"decomposition_mode": "StreamK"}, None),
        (
            {"decomposition_mode": "SplitK", "splits": 4},
            ReductionClass(16, splits=4, step=64, merge="turns"),
        ),
        ({"tile_scheduler": "Persistent"}, ReductionClass(16)),
        ({"tile_scheduler": "Persistent", "swap_ab": True, "tile_k": 128}, ReductionClass(16)),
    ],
)
def test_classes_of_cutlass_kernels(changes: dict[str, Any], expected: Any) -> None:
    config = Config("gemm", {**CUTLASS, **changes})
    assert families()["gemm"].reduction_class(LINEAR, config) == expected


def test_promotion_and_factors_are_part_of_a_class() -> None:
    gemm = families()["gemm"]
    kernel = Config("gemm", {**CUTLASS, "tile_scheduler": "Persistent"})
    swapped = Config("gemm", {**kernel.params, "swap_ab": True})
    exact = GemmProblem(1, 512, 512, dtype=E4M3, fast_accum=False)
    assert gemm.reduction_class(exact, kernel) == ReductionClass(32, promoted=128)
    by_rows = replace(exact, scales="row", fast_accum=True)
    classes = {gemm.reduction_class(by_rows, one) for one in (kernel, swapped)}
    assert len(classes) == 2  # the factors of either side come first
    assert gemm.reduction_class(replace(exact, fast_accum=True), kernel) == ReductionClass(32)


def test_undivided_cluster_kernels_add_as_cutlass_does() -> None:
    cluster = families()["cluster_gemm"]
    params: dict[str, Any] = {
        "swap_ab": True,
        "tile_m": 64,
        "tile_n": 64,
        "stages": 6,
        "blocks_per_sm": 1,
    }
    launch: dict[str, Any] = {"raster_order": "AlongM", "max_swizzle_size": 1, "pdl": True}
    one, two = (
        cluster.reduction_class(LINEAR, Config("cluster_gemm", {**params, **launch, "split_k": n}))
        for n in (1, 2)
    )
    assert one == ReductionClass(16)
    assert two == ReductionClass(16, splits=2, step=64, merge="cluster")
    assert ReductionClass(16, splits=2).label() == "depth=16,splits=2"


def test_splits_of_keys_and_block_masks_have_no_class() -> None:
    fused, params = families()["fused_attention"], {
        **{"warp_groups": 1, "tile_n": 128, "kv_stages": 2, "score_buffers": 1, "early_exp": 0},
        **{"q_in_registers": False, "persistent": False, "blocks_per_sm": 1, "pdl": True},
    }  # fmt: skip
    dense = AttentionProblem.parse("H=4,S=512,D=128")

    def reduction(problem: AttentionProblem = dense, **changes: Any) -> Any:
        return fused.reduction_class(problem, Config("fused_attention", {**params, **changes}))

    assert reduction(splits=1) == ReductionClass(16, keys=128)
    assert reduction(splits=1, key_groups=2) == ReductionClass(16, keys=128, key_groups=2)
    assert reduction(splits=1, rescale="lazy") == ReductionClass(16, keys=128, rescale="lazy")
    assert reduction(splits=1, rescale="lazy") != reduction(splits=1)
    assert reduction(splits=2, combine="kernel") is None
    fixed = ReductionClass(16, splits=0, step=512, merge="order", keys=128)
    for more in ({}, {"combine": "kernel"}, {"persistent": True}):
        assert reduction(splits=1, split_keys=512, **more) == fixed
    whole = Config("fused_attention", {**params, "splits": 1, "split_keys": 512})
    shared = Config("fused_attention", {**whole.params, "combine": "kernel"})
    assert fused.kernels(dense, whole) == fused.kernels(dense, shared)
    blocks = [
        [
            fused.launches(replace(dense, seqlen_kv=keys), config, 1.0)[0].integers[-3]
            for keys in (512, 513, 4096)
        ]
        for config in (whole, shared)
    ]
    assert blocks == [[1, 1, 1], [1, 2, 8]]
    sparse = AttentionProblem.parse("H=4,S=512,D=128,block_mask=1")
    assert reduction(sparse, splits=1) is None


torch = pytest.importorskip("torch", reason="torch is not installed")

from portfolio_machine import Serving, portfolio_serving  # noqa: E402
from runtime_machine import fake_machine, inputs  # noqa: E402

from tuner.errors import ConfigError, NotInvariantError  # noqa: E402
from tuner.runtime.call import invariance  # noqa: E402

machine, serving = fake_machine, portfolio_serving
BATCH = "batch"
E4M3_TYPE, HALF, ONE = torch.float8_e4m3fn, torch.float16, torch.ones(1, 1)
STARTS = torch.tensor([0, 8, 16], dtype=torch.int32)
TABLE = torch.tensor([[0], [1]], dtype=torch.int32)


@pytest.fixture
def of_portfolio(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode has the portfolio's kernels alone."""
    monkeypatch.setattr(families()["fused_attention"], "invariant_kernels", lambda *_: ())


@pytest.mark.usefixtures("of_portfolio")
def test_a_call_has_the_class_s_kernel_and_not_pytorchs(serving: Serving) -> None:
    with invariance.deterministic(BATCH):
        assert serving.call() and serving.call((2, 4, 40, 64))
        assert serving.launched == ["key-wide"] * 2
        # The other class's kernel does not stand in for one that cannot run.
        serving.runtime.table.table.forget()
        serving.proven["128"] = "a kernel is not built (tuner build --portfolio)"
        with pytest.raises(NotInvariantError, match="is not built") as caught:
            serving.call()
        assert "\n" not in str(caught.value) and "deterministic('batch')" in str(caught.value)
    assert serving.call() and serving.launched[-1] == "key-narrow"


def test_the_fastest_kernel_of_all_does_not_answer_where_it_is_of_another_class(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = ReductionClass(16, keys=64)
    monkeypatch.setattr(invariant, "class_of", lambda *_: narrow)
    assert serving.call() and serving.launched == ["key-wide"]
    with invariance.deterministic(BATCH):
        assert serving.call() and serving.launched[1:] == ["key-narrow"]
    assert serving.call() and serving.launched[2:] == ["key-wide"]


@pytest.mark.usefixtures("of_portfolio")
def test_a_kernel_whose_rows_vary_serves_no_call_of_the_mode(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = serving.runtime.proven_kernels.lists
    monkeypatch.setattr(lists, "variant", lambda keys: "vary" if "key-wide" in keys else "")
    with invariance.deterministic(BATCH), pytest.raises(NotInvariantError, match="vary"):
        serving.call()
    assert serving.call() and serving.launched == ["key-wide"]


def test_a_variable_is_the_mode_of_a_whole_program(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_BATCH_INVARIANT", "1")
    serving.machine.time_passes()
    assert serving.call()
    with pytest.raises(NotInvariantError):
        serving.machine.attention(*inputs(), dropout_p=0.5)
    with invariance.deterministic(BATCH):  # no switch: the plans stay
        assert serving.call()
    assert len(serving.machine.problems) == 0, "no decision of another order of additions is read"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products_and_attention_without_a_kernel_are_errors(serving: Serving, dtype: str) -> None:
    import tuner

    a, b = (torch.ones(16, 24, dtype=getattr(torch, dtype)) for _ in range(2))
    packed, caches = [torch.ones(16, 2, 32)] * 3, [torch.ones(2, 16, 2, 32)] * 2
    latent = torch.ones(2, 1, 16, 576).half(), torch.ones(2, 16, 576).half()
    calls: tuple[Any, ...] = (
        lambda: tuner.linear(a, b),
        lambda: tuner.linear(a, b.requires_grad_()),
        lambda: tuner.matmul(a, b.t()),
        lambda: tuner.matmul(a, b.t(), out=torch.empty(16, 16, dtype=a.dtype)),
        lambda: tuner.matmul(torch.stack((a, a)), torch.stack((b.t(), b.t()))),
        lambda: tuner.swiglu(a, torch.ones(64, 24, dtype=a.dtype)),
        lambda: tuner.scaled_mm(a.to(E4M3_TYPE), b.to(E4M3_TYPE).t(), ONE, ONE, None, None, HALF),
        lambda: tuner.grouped_mm(a, torch.ones(2, 8, 24, dtype=a.dtype), STARTS),
        lambda: tuner.attention_varlen(*packed, STARTS, STARTS, 8, 8),
        lambda: tuner.paged_attention(packed[0], *caches, TABLE, TABLE[:, 0] + 9, STARTS),
        lambda: tuner.mla_decode(*latent, TABLE, TABLE[:, 0] + 9, scale=1.0),
        lambda: serving.machine.attention(*inputs((1, 2, 16, 24)), dropout_p=0.1),
        lambda: tuner.moe(
            a, torch.zeros(16, 2, dtype=torch.int32), torch.ones(16, 2),
            torch.ones(2, 16, 24, dtype=a.dtype), torch.ones(2, 24, 8, dtype=a.dtype),
        ),
    )  # fmt: skip
    with tuner.deterministic(BATCH):
        for call in calls:
            with pytest.raises(NotInvariantError):
                call()
    calls[0]()  # PyTorch's again


def test_calls_without_rows_are_pytorchs(serving: Serving) -> None:
    import tuner

    none, b = torch.ones(0, 24).half(), torch.ones(16, 24).half()
    with tuner.deterministic(BATCH):
        for _ in range(2):
            assert tuner.linear(none, b).shape == tuner.matmul(none, b.t()).shape == (0, 16)
        assert tuner.swiglu(none, torch.ones(64, 24).half()).shape == (0, 32)
        assert serving.machine.attention(*inputs((0, 2, 16, 24))).shape == (0, 2, 16, 24)
        experts = torch.ones(2, 16, 24).half(), torch.ones(2, 24, 8).half()
        places = torch.ones(0, 2, dtype=torch.int32), torch.ones(0, 2)
        assert tuner.moe(none, *places, *experts).shape == (0, 24)


@pytest.mark.parametrize("window", [(200, -1), (200, 200)])
def test_a_window_that_hides_no_key_yet_is_one_of_the_longer_calls_layer(
    window: tuple[int, int], on_cpu: SimpleNamespace
) -> None:
    """Else a request would have other bits beside a longer one, whose keys the window hides."""
    from tuner.runtime.attention import attention_call, paged
    from tuner.runtime.attention.composed import Extras

    is_causal, options = window[1] < 0, (1.0, True, Extras(*window))

    def dense(length: int) -> AttentionProblem:
        tensors = [torch.empty(1, 4, length, 128, dtype=torch.bfloat16)] * 3
        return attention_call.pose(*tensors, is_causal, *options).problem  # type: ignore[return-value]

    def over_pages(length: int) -> AttentionProblem:
        query = torch.empty(length, 4, 128, dtype=torch.bfloat16)
        cache = [torch.empty(64, 16, 4, 128, dtype=torch.bfloat16)] * 2
        table, sizes = torch.empty(1, 64, dtype=torch.int32), (length, length)
        tensors = query, *cache, table, table[0, :1], table[0, :2], None
        call = paged.paged_call(*tensors, *sizes, is_causal, Extras(*window), 1.0)
        return call.pose().problem  # type: ignore[return-value]

    for pose in (dense, *([over_pages] if is_causal else [])):
        assert not pose(100).is_windowed
        with invariance.deterministic(BATCH):
            few, many = pose(100), pose(1000)
        assert (
            (few.window_left, few.window_right) == window == (many.window_left, many.window_right)
        )
        assert invariant.layer(few) == invariant.layer(many)
        assert all(one.is_windowed for one in invariant.layer(few))
        assert chosen(few)[1] == chosen(many)[1]


def test_lower_right_masks_are_of_the_layer_of_whole_prompts() -> None:
    prompt = AttentionProblem.parse("B=1,H=8,S=512,D=96,causal=1,dtype=bf16")
    chunk = replace(prompt, seqlen_q=100, is_causal=False, window_right=412)
    assert chunk.is_windowed and invariant.layer(chunk) == invariant.layer(prompt)
    assert chosen(chunk)[1] == chosen(prompt)[1]


def test_the_mode_ends_after_an_error_and_nests(on_cpu: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="'run'"), invariance.deterministic("run"):
        pass
    with pytest.raises(ValueError), invariance.deterministic(BATCH):
        with invariance.deterministic(BATCH):
            pass
        assert invariance.is_on()
        raise ValueError
    assert not invariance.is_on()
