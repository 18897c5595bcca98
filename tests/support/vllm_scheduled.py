"""Batches of vLLM's own scheduler, as its model runner hands them to attention's builder."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

PROMPTS = (10, 30, 90)
"""Tokens of the requests' prompts; the last one is longer than a step, so that it is chunked."""
TOKENS = 64
"""New tokens of a step."""
BLOCKS = 100


class _Answers:
    """A part of vLLM that this test leaves out: each attribute is False, each call True."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        return _Flag()


class _Flag:
    def __bool__(self) -> bool:
        return False

    def __call__(self, *arguments: Any, **options: Any) -> bool:
        return True


def batches(page_size: int, heads_kv: int, width: int, columns: int) -> Iterator[Any]:
    """Steps of three requests until the last prompt is decoded: `CommonAttentionMetadata`."""
    scheduler = _scheduler(page_size, heads_kv, width)
    outputs = importlib.import_module("vllm.v1.outputs")
    pages: dict[str, list[int]] = {}
    for _ in range(4):
        scheduled = scheduler.schedule()
        for one in scheduled.scheduled_new_reqs:
            pages[one.req_id] = list(one.block_ids[0])
        cached = scheduled.scheduled_cached_reqs
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            pages[name] += new[0] if new else []
        sizes = scheduled.num_scheduled_tokens
        requests = {name: scheduler.requests[name] for name in sizes}
        ends = {name: one.num_computed_tokens for name, one in requests.items()}
        yield _common(sizes, ends, pages, page_size, columns)
        done = [name for name, one in requests.items() if ends[name] >= one.num_tokens]
        result = outputs.ModelRunnerOutput(
            req_ids=list(sizes),
            req_id_to_index={name: place for place, name in enumerate(sizes)},
            sampled_token_ids=[[7] if name in done else [] for name in sizes],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        scheduler.update_from_output(scheduled, result)


def _scheduler(page_size: int, heads_kv: int, width: int) -> Any:
    config = importlib.import_module("vllm.config")
    caches = importlib.import_module("vllm.v1.kv_cache_interface")
    limits = config.SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=TOKENS,
        max_model_len=512,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
    )
    cache = config.CacheConfig(block_size=page_size, enable_prefix_caching=False)
    device = config.DeviceConfig(device="cpu")
    whole = config.VllmConfig(scheduler_config=limits, cache_config=cache, device_config=device)
    model = _Answers(max_model_len=512, runner_type="generate", multimodal_config=None)
    object.__setattr__(whole, "model_config", model)
    cache.num_gpu_blocks = BLOCKS
    spec = caches.FullAttentionSpec(
        block_size=page_size, num_kv_heads=heads_kv, head_size=width, dtype=torch.bfloat16
    )
    groups = [caches.KVCacheGroupSpec(["layer"], spec)]
    held = caches.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    kind = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    scheduler = kind(whole, held, _Answers(), block_size=page_size)
    request = importlib.import_module("vllm.v1.request").Request
    sampling = importlib.import_module("vllm.sampling_params").SamplingParams
    for number, count in enumerate(PROMPTS):
        scheduler.add_request(
            request(
                request_id=str(number),
                prompt_token_ids=list(range(count)),
                sampling_params=sampling(max_tokens=8),
                pooling_params=None,
            )
        )
    return scheduler


def _common(
    sizes: dict[str, int],
    ends: dict[str, int],
    pages: dict[str, list[int]],
    page_size: int,
    columns: int,
) -> Any:
    """A step's batch.

    Args:
        sizes: new tokens of each request.
        ends: keys of each request, the new ones among them.
        pages: each request's pages.
        page_size: keys of a page.
        columns: columns of the table.
    """
    kinds = importlib.import_module("vllm.v1.attention.backend")
    table = torch.zeros(len(sizes), columns).int()
    slots = []
    for row, (name, size) in enumerate(sizes.items()):
        table[row, : len(pages[name])] = torch.tensor(pages[name])
        places = range(ends[name] - size, ends[name])
        slots += [
            pages[name][place // page_size] * page_size + place % page_size for place in places
        ]
    starts = torch.tensor([0, *itertools.accumulate(sizes.values())]).int()
    return kinds.CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([ends[name] for name in sizes]).int(),
        num_reqs=len(sizes),
        num_actual_tokens=sum(sizes.values()),
        max_query_len=max(sizes.values()),
        max_seq_len=max(ends[name] for name in sizes),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
    )
