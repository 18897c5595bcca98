"""A model's layers as Transformers computes them: its own classes run on PyTorch's meta device.

Nothing is loaded and nothing computed: tensors have shapes and strides only. The model's class
calls attention and experts that note their arguments. Masks are asked for the keys that they show.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN
from transformers.integrations import moe
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

from tuner.errors import ConfigError
from tuner.problem.architecture import Attention, Experts, Linear, Model, counted, grouped

NAME = "tuner_listing"
"""Name of the noting functions in Transformers' registries."""
BATCH, TOKENS = 3, 5
"""Sequences and their tokens; the products of two primes tell what the rows of a layer are."""
MIN_SPAN = 4096
"""Keys beyond the widest stated window over which a mask is asked."""
#: Keywords of attention that change its result and are in no problem here.
_OTHER = ("position_bias", "indices", "block_indices")
_PRODUCTS = ("matmul", "__matmul__", "bmm", "mm", "baddbmm", "einsum")
_SILU = (torch.nn.SiLU, type(ACT2FN["silu"]))
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def architecture(data: Mapping[str, Any]) -> Model:
    """The layers of the model that a configuration describes; of several parts, its text part.

    Raises:
        ConfigError: when Transformers does not know the model, or cannot run it so.
    """
    with _quiet():
        return _architecture(data)


def _architecture(data: Mapping[str, Any]) -> Model:
    config = _config(data)
    kind = str(config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"model_type={kind} is an encoder with a decoder (allowed: one of both)")
    dtype = str(config.dtype or data.get("dtype") or data.get("torch_dtype") or "")
    dtype = dtype.removeprefix("torch.")
    with _noting() as notes:
        try:
            _run(config, _DTYPES.get(dtype, torch.bfloat16), notes)
        except Exception as exc:  # a model's own code, of many authors
            reason = " ".join(str(exc).split())[:120]
            raise ConfigError(
                f"model_type={kind} cannot be run by Transformers {transformers.__version__} "
                f"without its weights: {type(exc).__name__}: {reason}"
            ) from exc
    if data.get("quantization_config"):
        notes.leave_out("quantised weights, whose products are listed as of the model's type")
    return notes.model(config, dtype)


def _config(data: Mapping[str, Any]) -> Any:
    """The text part's configuration, as its own class completes it."""
    text = data.get("text_config")
    for row in (data, text if isinstance(text, dict) else {}):
        kind = row.get("model_type")
        if kind in transformers.CONFIG_MAPPING:
            values = {key: value for key, value in row.items() if key != "model_type"}
            try:
                return transformers.AutoConfig.for_model(kind, **values).get_text_config(True)
            except Exception as exc:  # checks of many authors
                reason = " ".join(str(exc).split())
                raise ConfigError(f"model_type={kind}: {reason}") from exc
    raise ConfigError(
        f"model_type={data.get('model_type')} is not known to Transformers "
        f"{transformers.__version__}"
    )


def _run(config: Any, dtype: torch.dtype, notes: _Notes) -> None:
    """One pass of the model over `BATCH` sequences, from an empty cache."""
    is_decoder = (
        config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and config.model_type not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )
    auto = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModel
    ways = {"attn_implementation": NAME, "experts_implementation": NAME}
    with torch.device("meta"), torch.no_grad():
        model = auto.from_config(config, dtype=dtype, **ways).eval()
        for part in model.modules():
            if hasattr(part, "warn_if_padding_and_no_attention_mask"):  # which reads the tokens
                part.warn_if_padding_and_no_attention_mask = lambda *_: None
        notes.look_at(model)
        options: dict[str, Any] = {"use_cache": True} if is_decoder else {}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            options["logits_to_keep"] = 1
        with notes:
            model(input_ids=torch.zeros(BATCH, TOKENS, dtype=torch.long), **options)


class _Notes(TorchFunctionMode):  # type: ignore[misc]  # torch is skipped
    """What a model calls while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self._attentions = Counter[Attention]()
        self._experts = Counter[Experts]()
        self._linears: dict[str, Counter[Linear]] = {}
        self._gates: dict[Linear, None] = {}
        self._left_out: dict[str, None] = {}
        self._masks: dict[int, tuple[torch.Tensor, tuple[int, int] | None]] = {}
        self._names: dict[int, str] = {}
        self._dtype = torch.bfloat16

    def model(self, config: Any, dtype: str) -> Model:
        if not (self._attentions or any("attention" in reason for reason in self._left_out)):
            self.leave_out("attention, which no layer calls by Transformers' interface")
        groups = Counter[tuple[Linear, ...]]()
        for layers in self._linears.values():
            for group in grouped(list(layers)):
                groups[group] += layers[group[0]]
        positions = getattr(config, "max_position_embeddings", 0)
        return Model(
            config.model_type,
            counted(self._attentions),
            tuple(counted(dict.fromkeys(group, count)) for group, count in groups.items()),
            tuple(self._gates),
            counted(self._experts),
            positions if isinstance(positions, int) else 0,
            dtype,
            bool(getattr(config, "kv_lora_rank", None)),
            tuple(self._left_out),
        )

    def leave_out(self, reason: str) -> None:
        self._left_out[reason] = None

    def look_at(self, model: torch.nn.Module) -> None:
        """Note names, and gated layers whose two products `tuner.swiglu` can compute as one."""
        self._dtype = model.dtype
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), name.rpartition(".")[0])
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear | Conv1D):  # before an embedding's, when tied
                self._names[id(module.weight)] = name
            children = dict(module.named_children())
            if any(isinstance(child, _SILU) for child in children.values()):
                self._look_at_gate(children)

    def _look_at_gate(self, children: Mapping[str, torch.nn.Module]) -> None:
        layers = {
            name: child
            for name, child in children.items()
            if isinstance(child, torch.nn.Linear) and child.bias is None
        }
        gate, up, fused = (layers.get(f"{name}_proj") for name in ("gate", "up", "gate_up"))
        if gate is not None and up is not None and gate.weight.shape == up.weight.shape:
            self._gates[Linear("gate_proj", gate.out_features, gate.in_features)] = None
        elif fused is not None:
            self._gates[Linear("gate_up_proj", fused.out_features // 2, fused.in_features)] = None

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function is functional.linear:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            self._add_linear(args[0], args[1], bias is not None, is_row=False)
        elif function is torch.addmm and id(args[2]) in self._names:
            self._add_linear(args[1], args[2], True, is_row=True)
        elif name in _PRODUCTS and any(id(arg) in self._names for arg in args):
            shapes = " by ".join(str(tuple(arg.shape)) for arg in args if hasattr(arg, "shape"))
            self.leave_out(f"a product of weights that is not a linear layer: {shapes}")
        elif name == "scaled_dot_product_attention" or (name == "softmax" and args[0].dim() > 3):
            self.leave_out("attention that a layer computes by itself")
        return function(*args, **kwargs)

    def _add_linear(
        self, rows: torch.Tensor, weight: torch.Tensor, has_bias: bool, *, is_row: bool
    ) -> None:
        n, k = (weight.shape[1], weight.shape[0]) if is_row else weight.shape
        path = self._names.get(id(weight), "")
        parent, _, name = path.rpartition(".")
        name = f"{parent.rpartition('.')[2]}.{name}" if name == "dense" else name
        count = rows.numel() // k
        if weight.dtype != self._dtype:
            self.leave_out(f"products in {str(weight.dtype).removeprefix('torch.')}: N={n},K={k}")
        elif count not in (BATCH, BATCH * TOKENS):
            self.leave_out(
                f"a layer whose rows are not the tokens: {name or 'unnamed'} N={n},K={k}"
            )
        else:
            layer = Linear(
                name, n, k, has_bias, "row" if is_row else "col", count == BATCH * TOKENS
            )
            self._linears.setdefault(parent, Counter())[layer] += 1

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of a layer, without its numbers."""
        batch, heads, tokens, head_dim = query.shape
        visible = self._visible(module, attention_mask, kwargs)
        reasons = [name for name in _OTHER if kwargs.get(name) is not None]
        if key.shape[:3] != value.shape[:3]:
            reasons.append(f"keys {tuple(key.shape)} and values {tuple(value.shape)}")
        if tokens != TOKENS or key.shape[2] != TOKENS:
            reasons.append("queries or keys that are not the tokens")
        if visible is None:
            reasons.append("a mask that is not causal, full or a window")
        if reasons:
            self.leave_out(f"attention with {', '.join(reasons)}")
        else:
            left, right = visible or (-1, -1)
            is_heads_first = heads > 1 and query.stride(1) > query.stride(2)
            sinks = kwargs.get("s_aux", kwargs.get("sinks"))
            attention = Attention(
                heads,
                key.shape[1],
                head_dim,
                left,
                right,
                float(kwargs.get("softcap") or 0),
                sinks is not None,
                is_heads_first,
                0 if value.shape[3] == head_dim else value.shape[3],
            )
            self._attentions[attention] += 1
        return query.new_empty(batch, tokens, heads, value.shape[3]), None

    def _visible(
        self, module: torch.nn.Module, mask: torch.Tensor | None, kwargs: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        """Keys before and behind its own that a query sees; -1: all. None: another pattern."""
        if mask is not None:
            return self._masks.get(id(mask), (mask, None))[1]
        is_causal = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
        if is_causal is None:
            return None
        left = (kwargs.get("sliding_window") or 0) - 1
        return left, 0 if is_causal else left

    def mask(
        self,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any],
        attention_mask: Any = None,
        local_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """A mask of the wanted shape; what it hides is noted beside it."""
        mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        pattern = None
        if attention_mask is None:
            with contextlib.suppress(RuntimeError):  # a mask by tensors without elements
                pattern = pattern_of(mask_function, local_size or 0)
        self._masks[id(mask)] = mask, pattern
        return mask

    def use_experts(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Experts of a layer, without their numbers."""
        turned = bool(getattr(module, "is_transposed", False))
        up = getattr(module, "gate_up_proj", None)
        up = getattr(module, "up_proj", None) if up is None else up
        if up is None or up.dim() != 3 or len(hidden_states) != BATCH * TOKENS:
            self.leave_out("experts whose weights are not known here")
            return torch.empty_like(hidden_states)
        groups, n, k = up.transpose(1, 2).shape if turned else up.shape
        inner = module.down_proj.shape[1 if turned else 2]
        self._experts[Experts(groups, top_k_index.shape[1], k, n, inner)] += 1
        return torch.empty_like(hidden_states)


def pattern_of(mask_function: Callable[..., Any], width: int) -> tuple[int, int] | None:
    """Keys before and behind its own that each query sees, by a mask function of Transformers.

    Args:
        mask_function: true where a query sees a key; of batch, head, query and key.
        width: stated width of a window; 0: none.

    Returns:
        Both numbers, -1 for all; None when queries differ or see keys with gaps between.
    """
    span = 2 * width + MIN_SPAN
    keys = torch.arange(2 * span, device="cpu")
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    patterns = set()
    for place in (span - 1, span, span + 1, span + width // 2 + 3):
        visible = mask_function(zero, zero, torch.tensor(place, device="cpu"), keys)
        visible = keys[visible.expand(len(keys))]
        if not len(visible) or len(visible) != visible[-1] - visible[0] + 1:
            return None
        left, right = place - int(visible[0]), int(visible[-1]) - place
        is_end = int(visible[-1]) == len(keys) - 1
        patterns.add((-1 if not visible[0] else left, -1 if is_end else right))
    return patterns.pop() if len(patterns) == 1 else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Transformers' warnings off: they are about weights and speed."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


@contextlib.contextmanager
def _noting() -> Iterator[_Notes]:
    """Transformers' registries with the functions of new notes under `NAME`."""
    notes = _Notes()
    registries: tuple[tuple[Any, Any], ...] = (
        (transformers.AttentionInterface, notes.attend),
        (transformers.AttentionMaskInterface, notes.mask),
        (moe.ALL_EXPERTS_FUNCTIONS, functools.partial(_Notes.use_experts, notes)),
    )
    for registry, function in registries:
        registry.register(NAME, function)
    yield notes
