"""Commands and Python call that put a result to use."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, Problem
from tuner.problem.base import E4M3
from tuner.problem.gemm import SCALE_BLOCK, GemmProblem
from tuner.problem.grouped_gemm import GroupedGemmProblem
from tuner.problem.swiglu import SwigluProblem


@dataclass(frozen=True)
class Use:
    """Build command and call of a measured problem."""

    build: str
    """Shell command that compiles the kernel; needs no GPU."""
    call: str
    """Python expression that calls it; empty if the runtime does not have such a call."""
    tensors: str
    """Shapes and types of the call's tensors."""

    @property
    def python(self) -> str:
        """Lines to paste; empty without a call."""
        if not self.call:
            return ""
        return f"import tuner\n# {self.tensors}\nout = {self.call}\nprint(tuner.stats())"


def use(problem: Problem, gpu: Gpu) -> Use:
    """How to build and call a problem's kernel.

    Args:
        problem: measured problem.
        gpu: GPU of the measurement, whose name ``tuner build`` takes.
    """
    op = "" if isinstance(problem, AttentionProblem) else f"--op {problem.op} "
    build = f"tuner build {op}--shape {problem.label()} --gpu '{gpu.name}'"
    call, tensors = "", ""
    if isinstance(problem, AttentionProblem):
        call, tensors = _attention(problem)
    elif isinstance(problem, GemmProblem):
        call, tensors = _product(problem)
    elif isinstance(problem, SwigluProblem) and problem.weights == "interleaved":
        m, n, k = problem.m, problem.n, problem.k
        call = "tuner.swiglu(x, tuner.interleave(gate, up))"
        tensors = f"x ({m}, {k}), gate and up ({n}, {k}), {problem.dtype}"
    elif isinstance(problem, GroupedGemmProblem):
        g, m, n, k = problem.groups, problem.m, problem.n, problem.k
        factors = ", scale_a=scale_a, scale_b=scale_b" if problem.dtype == E4M3 else ""
        call = f'tuner.grouped_mm(a, b, offsets, sizes="{problem.sizes}"{factors})'
        tensors = f"a ({m}, {k}), b ({g}, {n}, {k}), {problem.dtype}; offsets int32 ({g + 1})"
        if factors:
            blocks, columns = ceil(k / SCALE_BLOCK), ceil(n / SCALE_BLOCK)
            tensors += f"; scales fp32 ({m}, {blocks}) and ({g}, {columns}, {blocks})"
    return Use(build, call, tensors)


def _attention(p: AttentionProblem) -> tuple[str, str]:
    arguments = ["q", "k", "v"]
    kind = "float8_e4m3fn" if p.dtype == E4M3 else p.dtype
    if p.is_latent:
        return _latent(p)
    if p.is_paged:
        return _paged(p)
    if p.block_mask:
        return _sparse(p)
    values = f", v of {p.value_dim} columns" if p.value_dim else ""
    if p.is_varlen:
        call = "tuner.attention_varlen"
        arguments += ["cu_seqlens_q", "cu_seqlens_kv", str(p.seqlen_q), str(p.seqlen_kv)]
        q, kv = f"(total_q, {p.heads_q}, {p.head_dim})", f"(total_kv, {p.heads_kv}, {p.head_dim})"
        shapes = f"q {q}, k and v {kv}{values}, {kind}; cu_seqlens_* int32 ({p.batch + 1})"
    else:
        call = "tuner.attention"
        q = f"({p.batch}, {p.heads_q}, {p.seqlen_q}, {p.head_dim})"
        kv = f"({p.batch}, {p.heads_kv}, {p.seqlen_kv}, {p.head_dim})"
        shapes = f"q {q}, k and v {kv}{values}, {kind}"
    if (operand := p.mask_operand) is not None:
        arguments.append(f"attn_mask={operand.name}")
        shapes += f"; {operand.name} ({', '.join(map(str, operand.shape))})"
        shapes += ", bool" if p.mask else ""
    arguments += ["is_causal=True"] if p.is_causal else []
    arguments += ["enable_gqa=True"] if p.heads_kv != p.heads_q else []
    if (p.window_left, p.window_right) != (-1, -1):
        arguments.append(f"window=({p.window_left}, {p.window_right})")
    arguments += [f"softcap={p.softcap:g}"] if p.softcap else []
    if p.dtype == E4M3:
        arguments += [f"descale_{name}=descale_{name}" for name in "qkv"]
        shapes += f"; descale_q ({p.batch}, {p.heads_q}), descale_k and descale_v "
        shapes += f"({p.batch}, {p.heads_kv}), fp32"
    return f"{call}({', '.join(arguments)})", shapes


def _latent(p: AttentionProblem) -> tuple[str, str]:
    query = f"({p.batch}, {p.seqlen_q}, {p.heads_q}, {p.head_dim})"
    shapes = f"q {query}, cache (pages, {p.page_size}, {p.head_dim}), {p.dtype}; "
    shapes += f"page_table ({p.batch}, {max(p.pages) if p.is_paged else 1}) and "
    shapes += f"lengths ({p.batch}), int32"
    return "tuner.mla_decode(q, cache, page_table, lengths, scale=scale)", shapes


def _paged(p: AttentionProblem) -> tuple[str, str]:
    arguments = ["q", "k_cache", "v_cache", "page_table", "seqused_k", "cu_seqlens_q"]
    arguments += [f"max_seqlen_q={p.seqlen_q}", f"max_seqlen_k={p.seqlen_kv}"]
    arguments += [] if p.is_causal else ["causal=False"]
    if p.is_windowed:
        arguments.append(f"window=({p.window_left}, {p.window_right})")
    arguments += [f"softcap={p.softcap:g}"] if p.softcap else []
    arguments += ["sinks=sinks"] if p.has_sinks else []
    cache = f"(pages, {p.page_size}, {p.heads_kv}, {p.head_dim})"
    kind = "float8_e4m3fn" if p.dtype == E4M3 else p.dtype
    shapes = f"q (total_q, {p.heads_q}, {p.head_dim}), k_cache and v_cache {cache}, {kind}; "
    shapes += f"page_table ({p.batch}, {max(p.pages)}), seqused_k ({p.batch}) and "
    shapes += f"cu_seqlens_q ({p.batch + 1}), int32"
    shapes += f"; sinks ({p.heads_q}), fp32" if p.has_sinks else ""
    if p.dtype == E4M3:
        arguments += [f"{name}_scale={name}_scale" for name in "qkv"]
        shapes += f"; q_scale ({p.heads_q}), k_scale and v_scale ({p.heads_kv}), fp32"
    return f"tuner.paged_attention({', '.join(arguments)})", shapes


def _sparse(p: AttentionProblem) -> tuple[str, str]:
    arguments = ["q", "k", "v", "block_mask"]
    arguments += [f"softcap={p.softcap:g}"] if p.softcap else []
    q = f"({p.batch}, {p.heads_q}, {p.seqlen_q}, {p.head_dim})"
    kv = f"({p.batch}, {p.heads_kv}, {p.seqlen_kv}, {p.head_dim})"
    axes = ", ".join(str(size) for size in (*p.block_shape[:2], p.seqlen_q, p.seqlen_kv))
    shapes = f"q {q}, k and v {kv}, {p.dtype}; block_mask ({axes}), FlexAttention's"
    return f"tuner.sparse_attention({', '.join(arguments)})", shapes


def _product(p: GemmProblem) -> tuple[str, str]:
    if "residual" in p.epilogue or p.dtype_d == "float32":
        return "", ""  # the runtime adds no residual and writes no fp32
    if p.scales:
        if p.dtype != E4M3:
            return "", ""
        blocks, columns = ceil(p.k / SCALE_BLOCK), ceil(p.n / SCALE_BLOCK)
        factors = {
            "tensor": "of one element each",
            "row": f"({p.m}, 1) and (1, {p.n})",
            "block": f"({p.m}, {blocks}) and ({blocks}, {columns})",
        }[p.scales]
        result = ", scale_result=scale_d" if p.has_output_scale else ""
        call = f"tuner.scaled_mm(a, b, scale_a, scale_b{result}, out_dtype=torch.{p.dtype_d}"
        call += ", use_fast_accum=True)" if p.fast_accum else ")"
        shapes = f"a ({p.m}, {p.k}), b ({p.k}, {p.n}) stored by columns, float8_e4m3fn"
        return call, f"{shapes}; scales fp32 {factors}"
    if (p.layout_a, p.layout_b, p.batch) == ("row", "col", 1):
        has_bias = p.epilogue.startswith("bias")
        name = p.epilogue.removeprefix("bias").removeprefix("_")
        arguments = ["x", "weight", *(["bias"] if has_bias else [])]
        arguments += [f'activation="{name}"'] if name else []
        shapes = f"x ({p.m}, {p.k}), weight ({p.n}, {p.k}), {p.dtype}"
        shapes += f"; bias ({p.n})" if has_bias else ""
        return f"tuner.linear({', '.join(arguments)})", shapes
    if p.epilogue:
        return "", ""
    batch = f"{p.batch}, " if p.batch > 1 else ""
    orders = {"row": "by rows", "col": "by columns"}
    a = f"a ({batch}{p.m}, {p.k}) stored {orders[p.layout_a]}"
    return "tuner.matmul(a, b)", f"{a}, b ({batch}{p.k}, {p.n}) stored {orders[p.layout_b]}"
