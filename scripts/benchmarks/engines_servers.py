"""vLLM's engine and Transformers' manager for ``scripts/bench engines``, and their requests."""

from __future__ import annotations

import importlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.decoder import LLAMA_3_8B, Sizes
from benchmarks.engines_steps import FIRSTS, WHOLES, counted_replays, figures_of, median_s
from tuner.errors import BenchmarkError

#: Sizes and layers of a model card's config.json; `tiny` is for trying this out.
MODELS: dict[str, tuple[Sizes, int]] = {
    "1b": (Sizes(2048, 32, 8, 64, 8192, 128256), 16),
    "8b": (LLAMA_3_8B, 32),
    "8b-fp8": (LLAMA_3_8B, 32),
    "moe": (Sizes(2048, 32, 4, 128, 6144, 151936), 32),
    "tiny": (Sizes(64, 4, 2, 16, 96, 512), 2),
}
#: Other options of a model's config.json: factors of blocks; experts as Qwen3-30B-A3B's, which has
#: 48 such layers.
OPTIONS: dict[str, dict[str, Any]] = {
    "8b-fp8": {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
E4M3_DEVIATION, E4M3_MOST = 64.0, 448.0
"""Deviation of drawn weights in e4m3, and their largest value."""
#: Engines in one process, without a network; their weights are drawn, and nothing is built beside.
ENVIRONMENT = {
    "TUNER_BUILD_ON_MISS": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
VLLM = "vllm"
ALL = "tuner all"
"""A way whose attention and linear layers are the tuner's; in the way ``tuner`` attention is."""
VLLM_MODE, TUNER_MODE = "vllm mode", "tuner mode"
"""Ways of vLLM in its batch-invariant mode: by its own kernels, or by attention and linear layers
of the plug-in.
"""
OTHERS, OTHERS_TOKENS = 127, (5, 700)
"""Requests beside the one whose bits are compared, and the tokens of the shortest and longest."""
LOGPROBS = 5
PROMPTS, PROMPT = 4, 2048
"""Prompts of the pass that measures them, and their tokens."""
WARM_TOKENS = 16
SPARE_TOKENS = 64
"""Tokens of a request beside its own in the cache: its last page, and the engine's reserve."""
STEP_TOKENS = 8192
"""New tokens of a step at most."""
SHORTEST = 8
"""The longest prompt has so many times the tokens of the shortest; lengths are log-uniform."""


def config_of(model: str, **more: Any) -> dict[str, Any]:
    """Options of Hugging Face's config.

    Args:
        model: one of `MODELS`.
        more: others, or in place of these.
    """
    sizes, layers = MODELS[model]
    return {
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads_kv,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.inner,
        "vocab_size": sizes.vocabulary,
        "num_hidden_layers": layers,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": model == "1b",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        **more,
        **OPTIONS.get(model, {}),
    }


def draw_weights(model: Any) -> int:
    """Draw weights whose rows have sums about one, the same in every process.

    Args:
        model: a module on a GPU.
    """
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            continue  # a factor of the cache
        width = parameter.shape[-1]
        if "scale" in name:  # of blocks of 128 x 128
            deviation = (128 * width) ** -0.5 / E4M3_DEVIATION
            parameter.data.uniform_(0.5 * deviation, 1.5 * deviation, generator=generator)
        elif parameter.dtype == torch.float8_e4m3fn:
            drawn = torch.empty(parameter.shape, dtype=torch.bfloat16, device=parameter.device)
            drawn.normal_(0.0, E4M3_DEVIATION, generator=generator)
            parameter.data.copy_(drawn.clamp_(-E4M3_MOST, E4M3_MOST))
        elif parameter.dim() > 1:
            parameter.data.normal_(0.0, width**-0.5, generator=generator)
        else:
            parameter.data.fill_(1.0)
    return 0


def environment() -> None:
    """Set the variables of `ENVIRONMENT` that are not set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def model_folder(model: str) -> Iterator[str]:
    """A folder with a model card's config.json.

    Args:
        model: one of `MODELS`.
    """
    config = config_of(
        model,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        dtype="bfloat16",
        hidden_act="silu",
        rms_norm_eps=1e-5,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        yield folder


def stats_of() -> dict[str, Any]:
    """Calls since the last time by what answered them."""
    import tuner

    stats = tuner.stats(reset=True)
    return {"hits": stats.hits, "refused": {**stats.fallbacks, **stats.errors}}


@dataclass(frozen=True)
class Load:
    """Requests of a run: `counts` of them at once, one number after the other."""

    model: str
    counts: tuple[int, ...]
    prompt: int
    """Tokens of a prompt; of Transformers' longest."""
    new: int
    """New tokens of each request."""

    def prompts(self, count: int, length: int, seed: int = 0) -> list[list[int]]:
        """Tokens of so many prompts of one length: the same on every machine."""
        draw = random.Random(f"{count},{length},{seed}")
        vocabulary = MODELS[self.model][0].vocabulary
        return [[draw.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]

    def unlike(self) -> list[list[int]]:
        """Prompts of unlike lengths, the first of `counts`."""
        draw, shortest = random.Random(0), max(1, self.prompt // SHORTEST)
        whole = self.prompts(self.counts[0], self.prompt)
        return [one[: round(shortest * (self.prompt / shortest) ** draw.random())] for one in whole]


@dataclass
class Vllm:
    """vLLM's offline engine with drawn weights, greedy tokens, and graphs of decoding only.

    Args:
        way: ``vllm`` and `VLLM_MODE` are its own kernels, others the plug-in's.
        load: requests.
        is_default: vLLM's own compilation: torch.compile, piecewise graphs.
        cache: elements of its cache.
        is_eager: without graphs.
        ranks: processes that share its layers, a GPU each.
        rank: this process's number among them.
    """

    way: str
    load: Load
    is_default: bool = False
    cache: str = "auto"
    is_eager: bool = False
    ranks: int = 1
    rank: int = 0
    _llm: Any = None
    _warm: int = 0
    """Prompt tokens of a request before the timed ones; 0: as many as those have."""

    def start(self) -> dict[str, Any]:
        """Start the engine; facts of it."""
        environment()
        if self.way in (VLLM_MODE, TUNER_MODE):
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        begun = time.perf_counter()
        import vllm

        from tuner.runtime.engines.vllm import register

        options = self.options()
        if self.way not in (VLLM, VLLM_MODE):
            register()  # as the entry point does where the package is installed
            options["attention_backend"] = "CUSTOM"
        if self.way in (ALL, TUNER_MODE):
            options["quantization"] = "tuner"
            options["moe_backend"] = "triton"  # whose weights are not shuffled
        start = time.perf_counter()
        with model_folder(self.load.model) as folder:
            self._llm = vllm.LLM(folder, **options)
        ready_s = round(time.perf_counter() - start, 1)
        self._llm.apply_model(draw_weights)
        layers = self._llm.llm_engine.vllm_config.compilation_config.static_forward_context
        kinds = {type(one.impl).__qualname__ for one in layers.values() if hasattr(one, "impl")}
        facts = {"version": str(vllm.__version__), "attention": ", ".join(sorted(kinds))}
        seconds = {"import_s": round(start - begun, 1), "ready_s": ready_s}
        return {**facts, **seconds, **stats_of()}

    def options(self) -> dict[str, Any]:
        """Arguments of ``LLM``, the same for all ways. The cache holds what the requests need, and
        no more: several engines share the GPU.
        """
        load, most = self.load, max(self.load.counts)
        longest = max(PROMPT + 1, load.prompt + load.new)
        tokens = max(PROMPTS * longest, most * (load.prompt + load.new + SPARE_TOKENS))
        sizes, layers = MODELS[load.model]
        options: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": -(-longest // 1024) * 1024,
            "max_num_batched_tokens": STEP_TOKENS,
            "max_num_seqs": most,
            "gpu_memory_utilization": 0.01,  # of no meaning where the cache's bytes are given
            "kv_cache_memory_bytes": tokens * 4 * layers * sizes.heads_kv * sizes.head_dim,
            "kv_cache_dtype": self.cache,
            "enable_prefix_caching": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
            "seed": 0,
        }
        if self.ranks > 1:
            options["tensor_parallel_size"] = self.ranks
            options["distributed_executor_backend"] = "external_launcher"
        if self.is_eager:
            options["enforce_eager"] = True
        elif not self.is_default:
            captured = {*load.counts, *(2**i for i in range(most.bit_length()))}
            options["compilation_config"] = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sorted(size for size in captured if size <= most),
            }
        return options

    def run(self) -> dict[str, Any]:
        """Times and tokens of each number of requests; prompt tokens a second of `PROMPTS`."""
        import torch

        self._generate(PROMPTS, self._warm or PROMPT, 1, 0)
        took, _ = self._generate(PROMPTS, PROMPT, 1, 1)
        served = {str(count): self._served(count) for count in self.load.counts}
        served[f"{PROMPTS} prompts"] = {"tokens_per_s": PROMPTS * PROMPT / took}
        self._warm = WARM_TOKENS
        return {
            "concurrency": served, "memory_bytes": torch.cuda.max_memory_reserved(), **stats_of()
        }  # fmt: skip

    def answers(self) -> dict[str, Any]:
        """In the batch-invariant mode: whether a request has the tokens and log-probabilities that
        it has alone, among others and with its prompt in the cache.
        """
        if self.way not in (VLLM_MODE, TUNER_MODE):
            return {}
        draw, new = random.Random(0), self.load.new
        (mine,) = self.load.prompts(1, self.load.prompt, 2)
        others = [self.load.prompts(1, draw.randint(*OTHERS_TOKENS), i)[0] for i in range(OTHERS)]
        _, (alone,) = self._asked([mine], new, LOGPROBS)
        same = {"cached": self._asked([mine], new, LOGPROBS, is_cold=False)[1] == [alone]}
        for name, place in (("first", 0), ("amidst", OTHERS // 2), ("last", OTHERS)):
            batch = [*others[:place], mine, *others[place:]]
            _, outputs = self._asked(batch, new, LOGPROBS, is_cold=name != "amidst")
            same[name] = outputs[place] == alone
        return {"same": same, **stats_of()}

    def _served(self, count: int) -> dict[str, Any]:
        load = self.load
        self._generate(count, self._warm or load.prompt, 2, 0)
        first = median_s(count, FIRSTS, lambda: self._generate(count, load.prompt, 1, 1)[0])
        tokens: list[list[int]] = []

        def seconds() -> float:
            took, tokens[:] = self._generate(count, load.prompt, load.new, 1)
            return took

        with counted_replays() as graphs:
            whole = median_s(count, WHOLES, seconds)
            # Prompts of several steps end at several: a replay then has the lengths of the last.
            figures = figures_of(graphs) if count * load.prompt <= STEP_TOKENS else {}
        return {
            "first_token_ms": first * 1e3,
            "token_ms": (whole - first) / max(1, load.new - 1) * 1e3,
            "tokens_per_s": count * load.new / whole,
            "tokens": tokens,
            **figures,
        }

    def _generate(
        self, count: int, length: int, new: int, seed: int
    ) -> tuple[float, list[list[int]]]:
        """Seconds until all requests have their new tokens, and these."""
        took, outputs = self._asked(self.load.prompts(count, length, seed), new)
        tokens = [of_one for of_one, _ in outputs]
        if [len(of_one) for of_one in tokens] != [new] * count:
            raise BenchmarkError(f"the engine did not give {count} x {new} tokens")
        return took, tokens

    def _asked(
        self, prompts: list[list[int]], new: int, logprobs: int | None = None, is_cold: bool = True
    ) -> tuple[float, list[Any]]:
        """Seconds until all requests are answered; tokens and log-probabilities of each.

        Args:
            prompts: tokens of each request's prompt.
            new: new tokens of each request.
            logprobs: tokens whose log-probabilities are told; None: none.
            is_cold: True if no prompt is in the cache before.
        """
        import vllm

        if is_cold:
            self._llm.reset_prefix_cache()
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        took = time.perf_counter() - start
        firsts = [output.outputs[0] for output in outputs]
        told = [
            [{token: of.logprob for token, of in step.items()} for step in first.logprobs]
            if logprobs
            else []
            for first in firsts
        ]
        return took, list(zip([list(first.token_ids) for first in firsts], told, strict=True))


@dataclass
class Batching:
    """Transformers' manager behind `generate_batch`, with the engine's defaults for an attention.

    Args:
        way: attention by Transformers' name.
        load: requests.
        page_size: tokens of a page of the cache.
    """

    way: str
    load: Load
    page_size: int = 256
    _manager: Any = None
    _open: ExitStack = field(default_factory=ExitStack)

    def start(self) -> dict[str, Any]:
        """Make the model, and answer all requests once: that captures graphs and loads kernels."""
        import transformers
        from transformers.generation.continuous_batching.utils import WorkloadHints

        importlib.import_module("tuner.runtime.engines.transformers")  # registers the attention
        load = self.load
        count, new = load.counts[0], load.new
        self._manager = self._open.enter_context(
            llama(load.model, self.way).continuous_batching_context_manager(
                generation_config=transformers.GenerationConfig(
                    max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
                ),
                continuous_batching_config=self._config(),
                workload_hints=WorkloadHints(
                    max_prompt_length=load.prompt, max_generated_length=new, num_requests=count
                ),
            )
        )
        facts = {"version": transformers.__version__, "ready_s": self.run()["seconds"]}
        return {**facts, "attention": self.way}

    def run(self) -> dict[str, Any]:
        """Answer all requests: seconds, rates and tokens.

        Raises:
            RuntimeError: when a request has not as many tokens as were asked.
        """
        new, start = self.load.new, time.perf_counter()
        names = self._manager.add_requests(self.load.unlike(), max_new_tokens=new)
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("Transformers' generation thread ended")
            elif result.error is not None:
                raise RuntimeError(f"a request failed: {result.error}")
            elif result.is_finished():
                answers[result.request_id] = list(map(int, result.generated_tokens))
        took = time.perf_counter() - start
        tokens = [answers[name] for name in names]
        if any(len(of_one) != new for of_one in tokens):
            raise RuntimeError(f"a request has not {new} new tokens")
        rates = {"requests_per_s": len(names) / took, "tokens_per_s": len(names) * new / took}
        served = {**rates, "tokens": tokens}
        return {"seconds": took, "concurrency": {str(len(names)): served}, **stats_of()}

    def answers(self) -> dict[str, Any]:
        """Nothing: each run tells its tokens."""
        return {}

    def _config(self) -> Any:
        """A cache of as many pages as all requests fill together, and the engine's defaults."""
        import transformers

        kind, load = transformers.ContinuousBatchingConfig, self.load
        names = kind.__dataclass_fields__
        pages = load.counts[0] * (-(-(load.prompt + load.new) // self.page_size) + 1)
        options: dict[str, Any] = {
            "page_size" if "page_size" in names else "block_size": self.page_size,
            "num_blocks": pages,
            "max_batch_tokens": min(STEP_TOKENS, pages * self.page_size),
        }
        if "auto_switch_to_flash" in names:
            options["auto_switch_to_flash"] = False
        # Else the runs behind the first would find their prompts in the cache.
        return kind(**options, allow_block_sharing=False)


def llama(model: str, way: str, cache: str = "paged|") -> Any:
    """Transformers' model, the same weights for every attention.

    Args:
        model: one of `MODELS`.
        way: its attention.
        cache: over pages, or over dense tensors where it is empty.
    """
    import torch
    import transformers

    known = transformers.AttentionInterface._global_mapping
    name = f"{cache}{way}" if "paged|sdpa" in known else way  # Transformers 5.17, and 5.23
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**config_of(model)),
            dtype=torch.bfloat16,
            attn_implementation=name,
        )
    return made.eval()
