"""PyTorch's fused attention backends, FlashAttention-3 and -4 where installed, and on request
unfused attention in three steps.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families import attention_work
from tuner.families.base import Domain
from tuner.families.peers import ANSWERS, FAILURES, Vendor, installed, off_rows, rated_us
from tuner.hardware import Gpu
from tuner.problem import E4M3, AttentionProblem, Layout, Problem
from tuner.problem.attention import NARROW_HEAD_DIM
from tuner.problem.packed import PackedProblem

#: kernel that torch carries -> its switch and its check of tensors in torch.backends.cuda, its
#: operator, and the operator's arguments between tensors or bias and dropout: no log-sum-exp. In
#: the order in which torch 2.11 chooses them on Hopper.
BACKENDS: dict[str, tuple[str, str, str, tuple[Any, ...]]] = {
    "cudnn": (
        "cudnn_sdp_enabled", "can_use_cudnn_attention",
        "_scaled_dot_product_cudnn_attention", (False,),
    ),
    "flash2": (
        "flash_sdp_enabled", "can_use_flash_attention", "_scaled_dot_product_flash_attention", ()
    ),
    "efficient": (
        "mem_efficient_sdp_enabled", "can_use_efficient_attention",
        "_scaled_dot_product_efficient_attention", (False,),
    ),
}  # fmt: skip
PEERS = ("flash3", "flash4")
SERVING = "flash3_serving"
#: The same without metadata: each call prepares itself.
UNPREPARED = "flash3_unprepared"
#: Keys of a trial run's sequence at most: those of a call may be gigabytes.
MAX_TRIED = 256
#: Its keywords for the factors of e4m3.
DESCALES = ("q_descale", "k_descale", "v_descale")
#: kernel -> (peer, further arguments). Zero splits let FlashAttention-3 choose how many parts the
#: keys are cut into; by default it takes one.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "flash3_splits": ("flash3", {"num_splits": 0}),
}
#: Kernels that take values of another width than keys.
_OF_ANY_VALUES = ("cudnn", "efficient", "naive", "flash3", "flash3_serving")
#: kernel -> rows and keys of FlashAttention-4's tile, which its package takes an argument for.
TILES = {f"flash4_{m}x{n}": (m, n) for m, n in ((128, 128), (128, 160), (192, 128), (192, 144))}
#: The layout that each kernel likes best: the one that it was written for.
LAYOUTS: dict[str, Layout] = {
    "cudnn": "bhsd",
    "naive": "bhsd",
    **dict.fromkeys(
        ("flash2", "efficient", *PEERS, *VARIANTS, SERVING, UNPREPARED, *TILES), "bshd"
    ),
}
#: kernel -> microseconds of a tiny call, then TFLOP/s of a large one: full and causal at D <= 64,
#: full and causal above. From one H200, CUDA 13.0, torch 2.11, cuDNN 9.19: (16,16,2048,64) and
#: (4,16,2048,128), and (1,16,1024,64) for the first. `efficient` was not measured: taken at 0.6
#: of flash2; `naive` at 0.1: its scores go through memory three times. The serving build and the
#: tiles were not measured either: taken for their peers.
RATES: dict[str, tuple[float, float, float, float, float]] = {
    "cudnn": (5.0, 463, 378, 623, 462),
    "flash2": (7.0, 296, 250, 344, 254),
    "efficient": (7.0, 178, 150, 206, 152),
    "flash3": (10.0, 488, 409, 653, 568),
    "flash3_splits": (10.0, 488, 409, 653, 568),
    "flash4": (6.5, 499, 373, 640, 528),
    "naive": (15.0, 30, 15, 34, 17),
}
RATES |= {
    SERVING: RATES["flash3"],
    UNPREPARED: RATES["flash3"],
    **dict.fromkeys(TILES, RATES["flash4"]),
}

Attend = Callable[..., Any]
"""attend(query, key, value, causal=, scale=) over (B, S, H, D) tensors; with ``window_size=(left,
right)`` and ``softcap=`` where the problem has them."""


class VendorSdpa(Vendor):
    """``kernel``: a backend of torch (cudnn, flash2, efficient), a peer (flash3, flash4) or a
    variant of one. FlashAttention-3's serving build and FlashAttention-4 over its tiles take part
    where they are installed; naive on request. ``layout``, if given: layout of its operands,
    whatever the problem's is.
    """

    name: ClassVar[str] = "vendor_sdpa"
    op: ClassVar[str] = AttentionProblem.op
    takes_value_dim = True
    takes_wide_heads = True
    offered: ClassVar[tuple[str, ...]] = (*BACKENDS, "flash3", *VARIANTS, "flash4")
    on_request: ClassVar[tuple[str, ...]] = ("naive", SERVING, UNPREPARED, *TILES)
    work_terms: ClassVar[tuple[str, ...]] = attention_work.CLOSED_TERMS
    amounts = staticmethod(attention_work.closed_work)
    options: ClassVar[Mapping[str, Domain]] = {"layout": ("bhsd", "bshd")}
    layouts = LAYOUTS

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if not reason and isinstance(problem, AttentionProblem):
            if problem.dtype == E4M3 or problem.is_latent:  # which other kernels refuse too
                return self.refusal(problem, SERVING)
        return reason

    def found(self) -> tuple[str, ...]:
        serving = (SERVING,) if installed.version(SERVING) else ()
        return (*serving, *(TILES if installed.is_package("flash4") else ()))

    def refusal(self, problem: Problem, kernel: str) -> str:
        if not isinstance(problem, AttentionProblem):
            return ""
        if kernel == UNPREPARED:
            is_other = problem.softcap or problem.is_windowed or problem.is_varlen
            if problem.has_sinks or not (problem.is_paged or is_other):
                return (
                    f"{kernel} is called with windows, soft caps, packed sequences and paged "
                    "caches without sinks, only"
                )
            rows = 64 if problem.is_windowed and problem.head_dim > 192 else 128
            if problem.is_paged and problem.seqlen_q > 1 and not problem.page_size % rows:
                return f"{kernel} reads whole tiles of pages of {rows} slots, unused ones included"
            kernel = SERVING
        if problem.dtype == E4M3 and kernel != SERVING:
            return f"{kernel} takes fp16 and bf16, not {E4M3} with descale factors"
        if problem.dtype == E4M3 and problem.heads_q != problem.heads_kv:
            return f"{kernel} takes a factor a KV head of {E4M3}: H and HKV must be equal"
        if problem.value_dim and (problem.is_latent or kernel not in _OF_ANY_VALUES):
            return f"{kernel} is not called with values of another width than keys"
        if problem.is_wide and not problem.is_latent and kernel not in ("efficient", "naive"):
            return f"{kernel} has no head dimension above {NARROW_HEAD_DIM}"
        if problem.is_paged:
            return "" if kernel == SERVING else f"{kernel} is not called with paged caches"
        if problem.is_varlen and kernel not in ("flash2", SERVING):
            return f"{kernel} is not called with variable lengths"
        if problem.is_windowed and kernel in ("cudnn", "efficient", *TILES):
            return f"{kernel} has no sliding window"
        if problem.softcap and kernel in BACKENDS:
            return f"{kernel} has no soft cap"
        if problem.bias and kernel not in ("cudnn", "efficient", "naive"):
            return f"{kernel} has no additive bias"
        if kernel in ("cudnn", "efficient") and (reason := off_rows(problem)):
            return f"{kernel} takes no {reason}"
        if problem.mask:
            return f"{kernel} is not called with boolean masks"
        if problem.block_mask:
            return f"{kernel} has no block-sparse mask"
        square = problem.seqlen_q == problem.seqlen_kv
        square = square and (not isinstance(problem, PackedProblem) or problem.is_alike)
        is_masked = problem.is_causal or problem.is_windowed
        if is_masked and not square and kernel in ("flash2", SERVING, *PEERS, *VARIANTS, *TILES):
            mask = "sliding window" if problem.is_windowed else "causal mask"
            return f"{kernel} aligns a {mask} bottom-right: SQ and SKV must be equal"
        return ""

    def trial(self, problem: Problem, kernel: str) -> Problem:
        if ANSWERS.get(kernel) != "flash3" or not isinstance(problem, AttentionProblem):
            return problem
        keys = min(problem.seqlen_kv, MAX_TRIED)
        return replace(problem, batch=1, seqlen_q=min(problem.seqlen_q, keys), seqlen_kv=keys)

    def connect(self, problem: AttentionProblem, kernel: str, scale: float) -> Attend | str:
        if kernel in (SERVING, UNPREPARED):
            module = installed.module_of(SERVING)
            if isinstance(module, str):
                return module
            if kernel == UNPREPARED and problem.is_paged:
                return UnpreparedPages(module, problem, scale)
            if problem.is_paged:
                return paged_call(module, problem, scale)
            return serving_call(module, problem, scale, is_prepared=kernel == SERVING)
        if problem.is_varlen and not problem.is_paged:
            return flash2_varlen_call(problem, scale)
        if kernel in BACKENDS:
            call = _backend_call(problem, kernel, scale)
            return flash2_call(problem, scale) if problem.is_windowed else call
        if kernel == "naive":
            return naive_call(problem, scale)
        name, options = VARIANTS.get(kernel, (kernel, {}))
        if kernel in TILES:
            options = {"tile_mn": TILES[kernel]}
        attend = tiled_peer() if kernel in TILES else peer(name)
        return attend if isinstance(attend, str) else peer_call(attend, problem, scale, **options)

    def environment(self) -> Mapping[str, str]:
        return {**super().environment(), **installed.versions((*PEERS, SERVING))}

    def legality_facts(self, problem: Problem) -> Hashable:
        if not isinstance(problem, AttentionProblem):
            return problem
        is_square = problem.seqlen_q == problem.seqlen_kv
        return problem.dtype, is_square, problem.is_causal, bool(off_rows(problem))

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        if not isinstance(problem, AttentionProblem):
            return float("inf")
        return rated_us(RATES[config["kernel"]], problem, gpu)


def _backend_call(problem: AttentionProblem, kernel: str, scale: float) -> Attend:
    """A backend's operator. Choosing the backend of `scaled_dot_product_attention` instead would
    choose it for the whole process, calls of other threads among them, and cost a call more time.

    Raises:
        RuntimeError: when PyTorch says that the backend does not take such tensors; and why.
    """
    import torch

    switch, check, operator, further = BACKENDS[kernel]
    causal, is_grouped = problem.is_causal, problem.heads_q != problem.heads_kv
    tensors = [
        torch.empty_strided(o.shape, o.strides, dtype=getattr(torch, o.dtype), device="cuda")
        for o in problem.operands[: 4 if problem.bias else 3]
    ]
    bias = tensors.pop() if problem.bias else None
    backends = torch.backends.cuda
    params = backends.SDPAParams(*tensors, bias, 0.0, causal, is_grouped)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        # A check says no to everything while its backend is switched off, as in another thread's
        # `sdpa_kernel`; what the operator does not take it then says itself, when it is tried.
        if getattr(backends, switch)() and not getattr(backends, check)(params, True):
            reasons = [str(w.message).partition("(Triggered internally")[0].strip() for w in notes]
            raise RuntimeError("; ".join(reasons) or f"{check} says no")
    attend = getattr(torch.ops.aten, operator).default

    whole = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_kv)
    takes_bias = kernel != "flash2"

    def call(query: Any, key: Any, value: Any, bias: Any = None) -> Any:
        biases = (bias if bias is None else bias.expand(whole),) if takes_bias else ()
        return attend(query, key, value, *biases, *further, 0.0, causal, scale=scale)[0]

    return call


def flash2_call(problem: AttentionProblem, scale: float) -> Attend:
    """FlashAttention-2 under a sliding window, which its operator in `BACKENDS` has not."""
    import torch

    attend = torch.ops.aten._flash_attention_forward.default
    lengths = problem.seqlen_q, problem.seqlen_kv
    window = dict(zip(("window_size_left", "window_size_right"), problem.visible, strict=True))

    def call(query: Any, key: Any, value: Any) -> Any:
        tensors = (tensor.transpose(1, 2) for tensor in (query, key, value))
        options = None, None, *lengths, 0.0, problem.is_causal, False
        return attend(*tensors, *options, scale=scale, **window)[0].transpose(1, 2)

    return call


def flash2_varlen_call(problem: AttentionProblem, scale: float) -> Attend:
    """FlashAttention-2 over packed sequences, a batch of one as the problem's operands have it."""
    import torch

    attend = torch.ops.aten._flash_attention_forward.default
    longest = problem.seqlen_q, problem.seqlen_kv

    def call(*inputs: Any, lengths: tuple[int, int] = longest) -> Any:
        *tensors, starts_q, starts_kv = inputs
        tensors = [tensor[0].transpose(0, 1) for tensor in tensors]
        options = starts_q, starts_kv, *lengths, 0.0, problem.is_causal, False
        return attend(*tensors, *options, scale=scale)[0].transpose(0, 1)[None]

    return call


def naive_call(problem: AttentionProblem, scale: float) -> Attend:
    """Three steps through torch: scores, softmax, product. The scores are fp32: large ones in fp16
    are wrong by more than the numerics gate allows.
    """
    import torch

    group = problem.heads_q // problem.heads_kv
    hidden: Any = None

    def call(query: Any, key: Any, value: Any, *biases: Any) -> Any:
        nonlocal hidden
        if group > 1:
            key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
        query, key, value = (t.flatten(0, 1) for t in (query, key, value))
        scores = torch.bmm(query, key.mT, out_dtype=torch.float32).mul_(scale)
        if problem.softcap:
            scores.div_(problem.softcap).tanh_().mul_(problem.softcap)
        for bias in biases:
            scores.unflatten(0, (problem.batch, problem.heads_q)).add_(bias)
        if problem.is_causal or problem.is_windowed:
            if hidden is None:
                left, right = problem.visible
                every = torch.ones_like(scores[0], dtype=torch.bool)
                hidden = every.triu(right + 1) | every.tril(-left - 1)
            scores.masked_fill_(hidden, -torch.inf)
        # A query that sees no key has NaN for its probabilities, and zeros for its output.
        weights = scores.softmax(-1).nan_to_num_(0) if problem.is_windowed else scores.softmax(-1)
        out = torch.bmm(weights.to(value.dtype), value)
        return out.unflatten(0, (problem.batch, problem.heads_q))

    return call


def peer_call(attend: Attend, problem: AttentionProblem, scale: float, **options: Any) -> Attend:
    """A peer's (B, S, H, D) kernel over the problem's (B, H, S, D) tensors, by views alone.

    Only a problem with a window or a soft cap passes `window_size` or `softcap`: a peer that takes
    neither says so.
    """
    if problem.is_windowed:
        options["window_size"] = problem.visible
    if problem.softcap:
        options["softcap"] = problem.softcap

    def call(query: Any, key: Any, value: Any) -> Any:
        tensors = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = attend(*tensors, causal=problem.is_causal, scale=scale, **options)
        return out.transpose(1, 2)

    return call


def serving_call(
    module: Any, problem: AttentionProblem, scale: float, is_prepared: bool = True
) -> Attend:
    """FlashAttention-3's serving build: its kernels of variable lengths. e4m3 comes with a factor a
    head.

    Args:
        module: the build.
        problem: problem of the calls.
        scale: factor of the scores.
        is_prepared: dense calls have the metadata that a server makes once a step.
    """
    import torch

    options: dict[str, Any] = {"causal": problem.is_causal, "scale": scale}
    if problem.is_windowed:
        options["window"] = problem.visible
    if problem.softcap:
        options["softcap"] = problem.softcap
    ready: dict[str, Any] = {}

    def prepared(query: Any, keys: int) -> dict[str, Any]:
        used = torch.full((len(query),), keys, dtype=torch.int32, device=query.device)
        of_call: dict[str, Any] = {"seqused_k": used, "max_seqlen_k": keys}
        if is_prepared:
            sizes = problem.seqlen_q, problem.seqlen_kv, problem.heads_q, problem.heads_kv
            masks = {name: value for name, value in options.items() if name != "scale"}
            plan = module.metadata(used, *sizes, problem.head_dim, query.dtype, **masks)
            of_call["metadata"] = plan
            ready.update(of_call)
        return of_call

    longest = problem.seqlen_q, problem.seqlen_kv

    def call(
        query: Any, key: Any, value: Any, *more: Any, lengths: tuple[int, int] = longest
    ) -> Any:
        if problem.is_varlen:
            tensors = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
            ends = {"cu_seqlens_q": more[0], "max_seqlen_q": lengths[0]}
            ends |= {"cu_seqlens_k": more[1], "max_seqlen_k": lengths[1]}
            return module.fwd(*tensors, **ends, **options).transpose(0, 1)[None]
        # Metadata: in the first call, which `tried` makes outside of any capture. Without it the
        # lengths are each call's own: a captured graph outlives its plan.
        of_call = ready or prepared(query, key.shape[2])
        factors = dict(zip(DESCALES, more, strict=False))
        tensors = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return module.fwd(*tensors, **of_call, **factors, **options).transpose(1, 2)

    return call


def paged_call(module: Any, problem: AttentionProblem, scale: float) -> Attend:
    """FlashAttention-3's serving build over a paged cache, with the metadata that a server makes
    once a step.
    """
    masks = _masks_of_pages(problem)
    longest = problem.seqlen_q, problem.seqlen_kv
    ready: dict[str, Any] = {}

    def call(
        query: Any, key: Any, value: Any, table: Any, used: Any, starts: Any, *more: Any
    ) -> Any:
        if not ready:  # in the first call, which `tried` makes outside of any capture
            sizes = *longest, problem.heads_q, problem.heads_kv, problem.head_dim
            of_pages = {"cu_seqlens_q": starts, "page_size": problem.page_size}
            ready["metadata"] = module.metadata(used, *sizes, query.dtype, **of_pages, **masks)
        lengths = {"cu_seqlens_q": starts, "max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
        options = {**lengths, **masks, **ready, "page_table": table, "seqused_k": used}
        if problem.has_sinks:
            options["sinks"] = more[0].to(query.dtype)
        elif more:  # factors of e4m3, one a head
            every = (factor.expand(problem.batch, -1) for factor in more)
            options |= zip(DESCALES, every, strict=True)
        cache = (tensor.transpose(1, 2) for tensor in (key, value))
        out = module.fwd(query[0].transpose(0, 1), *cache, scale=scale, **options)
        return out.transpose(0, 1)[None]

    return call


class UnpreparedPages:
    """FlashAttention-3's serving build over paged caches of any lengths, without metadata.

    Args:
        module: the build.
        problem: a problem with the calls' masks and types.
        scale: factor of the scores.
    """

    def __init__(self, module: Any, problem: AttentionProblem, scale: float) -> None:
        self._fwd = module.fwd
        self._options = {**_masks_of_pages(problem), "scale": scale}

    def __call__(
        self, query: Any, key: Any, value: Any, table: Any, used: Any, starts: Any, *more: Any
    ) -> Any:
        """The output of a problem's operands."""
        rows = query[0].transpose(0, 1)
        cache = (tensor.transpose(1, 2) for tensor in (key, value))
        lengths = len(rows), table.shape[1] * key.shape[2]
        (out,) = self.run(rows, *cache, table, used, starts, *more, lengths=lengths)
        return out.transpose(0, 1)[None]

    def run(
        self,
        query: Any,
        *others: Any,
        lengths: tuple[int, int],
        out: Any = None,
        with_lse: bool = False,
    ) -> tuple[Any, ...]:
        """Output and, if wanted, log-sum-exp of tensors as `tuner.paged_attention` takes them.

        Args:
            query: (total_q, H, D).
            others: caches, table, keys of the sequences, their first rows (empty: equally many for
                each) and factors of e4m3.
            lengths: most queries and keys of a sequence.
            out: tensor for the output.
            with_lse: also return the log-sum-exp.
        """
        key, value, table, used, starts, *factors = others
        if lengths[1] < table.shape[1] * key.shape[1]:  # keys beyond the most are not seen
            used = used.clamp(max=lengths[1])
        options = {**self._options, "page_table": table, "seqused_k": used, "out": out}
        options |= zip(DESCALES, (one.expand(len(used), -1) for one in factors), strict=False)
        rows: tuple[Any, ...] = starts, lengths[0]
        if not starts.numel():
            rows, query = (None, None), query.unflatten(0, (len(used), lengths[0]))
            options["out"] = None if out is None else out.view(query.shape)
        returned = self._fwd(
            *(query, key, value, *rows), max_seqlen_k=lengths[1], return_lse=with_lse, **options
        )
        result, *lse = returned if with_lse else (returned,)
        if starts.numel():
            return result, *lse
        return result.flatten(0, 1), *(one.transpose(0, 1).flatten(1) for one in lse)


def _masks_of_pages(problem: AttentionProblem) -> dict[str, Any]:
    """Keywords of masks."""
    window = (-1, -1)
    if problem.is_windowed:
        left, right = problem.window_left, problem.window_right
        window = (left, 0 if problem.is_causal else right)
    return {"causal": problem.is_causal, "window": window, "softcap": problem.softcap}


def peer(kernel: str) -> Attend | str:
    """Forward pass of FlashAttention-3 or -4, or the reason why it is not available."""
    module = installed.module_of(kernel)
    if isinstance(module, str):
        return module
    try:
        if hasattr(module, "fwd"):
            return _only_output(module.fwd, "scale")
        return _only_output(module.flash_attn_func, "softmax_scale")
    except AttributeError as exc:
        return f"{kernel} cannot be loaded: {exc}"


def tiled_peer() -> Attend | str:
    """FlashAttention-4's forward pass that takes a tile: of the package, not of its public API."""
    if not installed.is_package("flash4"):
        return "flash4 has tiles where the package flash-attn-4 is installed"
    try:
        module = importlib.import_module("flash_attn.cute.interface")
        return _only_output(module._flash_attn_fwd, "softmax_scale")
    except FAILURES as exc:
        return f"flash4 cannot be loaded: {type(exc).__name__} {exc}"


def _only_output(function: Callable[..., Any], scale_name: str) -> Attend:
    """A peer's call reduced to its output; some also return the log-sum-exp."""

    def attend(
        query: Any, key: Any, value: Any, *, causal: bool, scale: float, **options: Any
    ) -> Any:
        result = function(query, key, value, causal=causal, **{scale_name: scale}, **options)
        return result[0] if isinstance(result, tuple | list) else result

    return attend
