"""Attention under block masks: launches, answers of FlexAttention, and refusals."""

from __future__ import annotations

import gc
import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
from noted_kernels import find_kernels

from tuner.errors import ConfigError
from tuner.families.fused_attention import FusedAttention
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
BATCH, HEADS, HEADS_KV, QUERIES, KEYS, WIDTH = 2, 4, 2, 150, 300, 32


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Bottom-right, but for the first queries, which see no key."""
    return (k <= q + KEYS - QUERIES) & (q > 10)


def of_heads(b: Any, h: Any, q: Any, k: Any) -> Any:
    return causal(b, h, q, k) & (k % (h + 2) == 0)


def masked(mod: Any = causal, batch: Any = None, heads: Any = None, **options: Any) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mod, batch, heads, QUERIES, KEYS, device="cpu", **options)


def tensors(dtype: Any = torch.float32) -> list[Any]:
    shapes = (HEADS, QUERIES), (HEADS_KV, KEYS), (HEADS_KV, KEYS)
    return [torch.randn(BATCH, heads, rows, WIDTH).to(dtype) for heads, rows in shapes]


@pytest.fixture
def sparse(runtime: SimpleNamespace) -> Any:
    return importlib.import_module("tuner.runtime.attention.sparse")


def expected(given: list[Any], mod: Any, scale: float, softcap: float) -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_mask

    query, key, value = given
    key, value = (t.repeat_interleave(HEADS // HEADS_KV, 1) for t in (key, value))
    scores = query @ key.mT * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~create_mask(mod, 1, HEADS, QUERIES, KEYS, "cpu"), -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value, scores.logsumexp(-1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_flex_attention_answers_and_the_reason_is_counted(
    sparse: Any, runtime: SimpleNamespace, softcap: float
) -> None:
    given = tensors()
    options = {"scale": 0.3, "softcap": softcap}
    out, lse = sparse.sparse_attention(
        *given, masked(of_heads, None, HEADS), return_lse=True, **options
    )
    wanted, wanted_lse = expected(given, of_heads, 0.3, softcap)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    assert (out[:, :, :11] == 0).all() and lse[:, :, :11].isneginf().all()
    assert runtime.counters.stats().fallbacks == {"the tensors are not on a CUDA device": 1}
    alone = sparse.sparse_attention(*given, masked(of_heads, None, HEADS), **options)
    assert torch.equal(alone, out)


def test_graphs_of_torch_compile_hold_flex_attention(sparse: Any) -> None:
    given, mask, graphs = tensors(), masked(), []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda: sparse.sparse_attention(*given, mask), backend=keep, fullgraph=True
    )
    torch.testing.assert_close(compiled(), expected(given, causal, WIDTH**-0.5, 0.0)[0])
    assert "flex_attention" in {str(node.target) for node in graphs[0].graph.nodes}


@pytest.fixture
def served(
    on_cpu: SimpleNamespace, sparse: Any, monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """Fused attention kernels; FlexAttention's answer is the number of the call."""
    made = find_kernels(on_cpu, monkeypatch, lambda problem: FusedAttention(), is_strided=True)
    made.flex = []

    def flex(*arguments: Any, **options: Any) -> Any:
        made.flex.append(options)
        return len(made.flex)

    monkeypatch.setattr(sparse, "_compiled", lambda: flex)
    return made


def test_a_kernel_is_given_the_tables_of_the_mask(
    served: SimpleNamespace, on_cpu: SimpleNamespace, sparse: Any
) -> None:
    from tuner.runtime.attention import block_mask

    given, mask = tensors(torch.float16), masked(of_heads, None, HEADS)
    given[1] = given[1].transpose(1, 2).contiguous().transpose(1, 2)  # in another order
    out, lse = sparse.sparse_attention(*given, mask, scale=0.5, softcap=3, return_lse=True)
    [(_, problem)] = served.posed
    assert problem == AttentionProblem.parse(
        "B=2,H=4,HKV=2,SQ=150,SKV=300,D=32,softcap=3,block_mask=h"
    )
    [(addresses, integers, scalars)] = served.launched
    tables = block_mask.tables_of(mask)
    wanted = (*given, out, lse, *tables)
    assert addresses == [tensor.data_ptr() for tensor in wanted]
    assert (lse.shape, lse.dtype) == ((BATCH, HEADS, QUERIES), torch.float32)
    assert integers[9:12] == given[1].stride()[:3]
    assert integers[18:] == (1, integers[19], 0, 0, 2, 3)  # of a head two rows, of three columns
    assert scalars == (0.5, 3.0) and on_cpu.counters.stats().hits == 1
    assert not served.flex


def test_tables_are_made_once_and_live_as_long_as_the_mask(
    served: SimpleNamespace, on_cpu: SimpleNamespace, sparse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.runtime.attention import block_mask

    made = []
    own = block_mask.tabulated
    monkeypatch.setattr(block_mask, "tabulated", lambda mask: made.append(1) or own(mask))
    given, mask = tensors(torch.float16), masked()
    for _ in range(2):
        sparse.sparse_attention(*given, mask)
    assert len(made) == 1 and len(block_mask._known) == 1
    monkeypatch.setattr(on_cpu.devices, "stream_of", lambda index: 4711)
    sparse.sparse_attention(*given, mask)
    assert len(made) == 2, "memory of one stream's is not used on another"
    del mask
    gc.collect()
    assert not block_mask._known


def test_no_tables_are_made_in_a_graph_capture(
    served: SimpleNamespace, on_cpu: SimpleNamespace, sparse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, known, new = tensors(torch.float16), masked(), masked()
    sparse.sparse_attention(*given, known)
    monkeypatch.setattr(on_cpu.devices, "is_capturing", lambda: True)
    monkeypatch.setattr(on_cpu.devices, "stream_of", lambda index: 4711)
    sparse.sparse_attention(*given, known)
    assert len(served.launched) == 2 and served.launched[0][0][5:] == served.launched[1][0][5:]
    assert sparse.sparse_attention(*given, new) == 1
    reason = "a kernel cannot be loaded inside a graph capture"
    assert on_cpu.counters.stats().fallbacks == {reason: 1}


def test_calls_of_unlike_masks_are_of_unlike_kinds(served: SimpleNamespace, sparse: Any) -> None:
    given = tensors(torch.float16)
    for mask in (masked(), masked(), masked(batch=BATCH), masked(heads=HEADS)):
        sparse.sparse_attention(*given, mask)
    kinds = [kind for kind, _ in served.posed]
    assert kinds[0] == kinds[1] and len(set(kinds)) == 3
    assert [problem.block_mask for _, problem in served.posed] == ["1", "1", "b", "h"]


def refused(
    sparse: Any, on_cpu: SimpleNamespace, given: list[Any], mask: Any, **options: Any
) -> str:
    assert sparse.sparse_attention(*given, mask, **options) == 1
    [(reason, count)] = on_cpu.counters.stats().fallbacks.items()
    assert count == 1
    return str(reason)


def test_what_no_kernel_takes_is_flex_attention_s(
    served: SimpleNamespace, on_cpu: SimpleNamespace, sparse: Any
) -> None:
    given = tensors(torch.float16)
    given[0].requires_grad_()
    assert refused(sparse, on_cpu, given, masked()) == "a gradient is wanted"
    assert not served.launched and served.flex[0]["enable_gqa"]


@pytest.mark.parametrize("case", ["lengths", "batches", "size"])
def test_a_mask_that_does_not_fit_is_flex_attention_s(
    served: SimpleNamespace,
    on_cpu: SimpleNamespace,
    sparse: Any,
    case: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, mask = tensors(torch.float16), masked(batch=3 if case == "batches" else None)
    if case == "lengths":
        given[1:] = [tensor[:, :, :299] for tensor in given[1:]]
    if case == "size":
        monkeypatch.setattr(
            importlib.import_module("tuner.runtime.attention.block_mask"), "MAX_BITS_BYTES", 9
        )
    assert refused(sparse, on_cpu, given, mask) == "no kernel takes such a block mask"
    assert not served.launched and not served.posed


def test_a_negative_scale_is_flex_attention_s(
    served: SimpleNamespace, on_cpu: SimpleNamespace, sparse: Any
) -> None:
    given = tensors(torch.float16)
    assert refused(sparse, on_cpu, given, masked(), scale=-1.0) == "scale is not positive"


def test_wrong_arguments_are_refused_in_one_line(sparse: Any) -> None:
    given = tensors()
    with pytest.raises(ConfigError, match=r"block_mask is Tensor .allowed: BlockMask, which"):
        sparse.sparse_attention(*given, torch.ones(1))
    with pytest.raises(ConfigError, match=r"softcap=-1 is out of range"):
        sparse.sparse_attention(*given, masked(), softcap=-1)


class TestOperator:
    """`tuner::sparse_attention` over tables: a kernel where there is one, else FlexAttention."""

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
    @pytest.mark.parametrize("softcap", [0.0, 2.0])
    def test_without_a_kernel_flex_attention_reads_the_tables(
        self, sparse: Any, runtime: SimpleNamespace, softcap: float
    ) -> None:
        from tuner.runtime.attention import block_mask

        given = tensors()
        tables = block_mask.tabulated(masked(of_heads, None, HEADS))
        out, lse = torch.ops.tuner.sparse_attention_with_lse(*given, *tables, 0.3, softcap)
        wanted, wanted_lse = expected(given, of_heads, 0.3, softcap)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(lse, wanted_lse)
        alone = torch.ops.tuner.sparse_attention(*given, *tables, 0.3, softcap)
        assert torch.equal(alone, out)
        assert runtime.counters.stats().fallbacks == {"the tensors are not on a CUDA device": 2}

    @pytest.mark.parametrize("name", ["sparse_attention", "sparse_attention_with_lse"])
    def test_opcheck(self, sparse: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """With another answer than FlexAttention's, whose vmap the check of schemas cannot see."""
        from tuner.runtime.attention import block_mask

        def attend(query: Any, *_: Any, return_aux: Any = None, **options: Any) -> Any:
            out = (query * options["scale"]).contiguous()
            return (out, SimpleNamespace(lse=query.sum(-1))) if return_aux else out

        monkeypatch.setattr(sparse, "mask_by", lambda *_: None)
        monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", attend)
        tables = block_mask.tabulated(masked())
        operator = getattr(torch.ops.tuner, name).default
        in_order = tensors()
        for given in (in_order, [t.transpose(1, 2).contiguous().transpose(1, 2) for t in in_order]):
            torch.library.opcheck(operator, (*given, *tables), {"scale": 0.3, "softcap": 2.0})

    def test_a_graph_holds_it_under_a_mask_that_was_prepared(
        self, served: SimpleNamespace, sparse: Any, on_cpu: SimpleNamespace
    ) -> None:
        from tuner.runtime.attention.block_mask import prepare_block_mask

        given, graphs = tensors(torch.float16), []

        def keep(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        @torch.compile(backend=keep, fullgraph=True)
        def attend(mask: Any, with_lse: bool) -> Any:
            return sparse.sparse_attention(*given, mask, softcap=3, return_lse=with_lse)

        first, second = (prepare_block_mask(masked()) for _ in range(2))
        assert attend(first, False).shape == given[0].shape
        attend(second, False)
        assert len(graphs) == 1, "another mask is another input of the graph"
        assert "tuner.sparse_attention" in {str(node.target) for node in graphs[0].graph.nodes}
        attend(first, True)
        targets = {str(node.target) for node in graphs[1].graph.nodes}
        assert "tuner.sparse_attention_with_lse" in targets
        tables = [addresses[5:] for addresses, *_ in served.launched]
        assert tables[0] == tables[2] != tables[1]
        assert {scalars for *_, scalars in served.launched} == {(1 / math.sqrt(WIDTH), 3.0)}
        assert served.posed[0][1] == AttentionProblem.parse(
            "B=2,H=4,HKV=2,SQ=150,SKV=300,D=32,softcap=3,block_mask=1"
        )
        assert not served.flex and on_cpu.counters.stats().hits == 3

    def test_a_graph_holds_flex_attention_where_a_gradient_is_wanted(
        self, served: SimpleNamespace, sparse: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tuner.runtime.attention.block_mask import prepare_block_mask

        def attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
            return query + (key + value).sum(2, keepdim=True)[:, :1]

        monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", attend)
        given, mask = tensors(torch.float16), prepare_block_mask(masked())
        given[1].requires_grad_()
        compiled = torch.compile(
            lambda: sparse.sparse_attention(*given, mask), backend="eager", fullgraph=True
        )
        compiled().sum().backward()
        assert given[1].grad is not None and not served.launched
        with torch.no_grad():
            compiled()
        assert len(served.launched) == 1

    def test_it_has_no_gradient(self, sparse: Any) -> None:
        from tuner.runtime.attention import block_mask

        given, tables = tensors(), block_mask.tabulated(masked())
        given[0].requires_grad_()
        out = torch.ops.tuner.sparse_attention(*given, *tables)
        with pytest.raises(ConfigError, match=r"tuner::sparse_attention has no gradient .allowed"):
            out.sum().backward()

    def test_tables_of_another_mask_are_refused_in_one_line(self, sparse: Any) -> None:
        from tuner.runtime.attention import block_mask

        given, tables = tensors(), block_mask.tabulated(masked(heads=HEADS))
        for wrong in (
            [given[0], *(t[:, :, :200] for t in given[1:])],
            [given[0][:, :2], *given[1:]],
        ):
            with pytest.raises(ConfigError, match=r"the other tables are not for 2 blocks of qu"):
                torch.ops.tuner.sparse_attention(*wrong, *tables)
        with pytest.raises(ConfigError, match=r"block_counts .* of torch.int64 and the other"):
            torch.ops.tuner.sparse_attention(*given, tables[0].long(), *tables[1:])
        with pytest.raises(ConfigError, match="HKV a divisor of H"):
            torch.ops.tuner.sparse_attention(given[0][:, :3], *given[1:], *tables)

    def test_what_cannot_be_prepared_is_said(
        self, sparse: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tuner.runtime.attention import block_mask

        with pytest.raises(ConfigError, match=r"block_mask is NoneType .allowed: BlockMask"):
            block_mask.prepare_block_mask(None)
        monkeypatch.setattr(block_mask, "MAX_BITS_BYTES", 9)
        with pytest.raises(ConfigError, match=r"its bits take 12288 bytes .allowed: 9"):
            block_mask.prepare_block_mask(masked())
