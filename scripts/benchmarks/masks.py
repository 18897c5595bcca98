"""Attention under block-sparse masks: the own kernel, FlexAttention, and SDPA with a dense mask.

``scripts/bench masks`` times causal masks, documents, windows and prefixes over (4, 16, 4096, D) in
bf16. Each call stands behind a kernel that writes its queries (`benchmarks.call_times`).
FlexAttention is compiled by torch.compile. Own kernels of a few configs take part in a first pass,
and the fastest of them in the second. ``--compile`` only compiles the kernels. ``--served`` times
the portfolio's answers at other shapes (`benchmarks.masks_served`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import file_head, masks_served
from benchmarks.call_times import Contender, Times, time_calls
from benchmarks.gpu import need_gpu
from benchmarks.masks_served import MASKS
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler, find_toolchain
from tuner.compile.loading import LoadedKernel, load
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import family
from tuner.families.peers import stream_of
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem

FAMILY = family("fused_attention")
BATCH, HEADS, LENGTH = 4, 16, 4096
HEAD_DIMS = (64, 128)
#: (tile_n, score_buffers, kv_stages) of the configs that are tried.
TILES = ((128, 1, 2), (128, 1, 3), (128, 2, 2), (64, 2, 2))
Kernels = Mapping[Config, LoadedKernel]


@dataclass(frozen=True)
class Case:
    """One mask at one head dimension."""

    mask: str
    head_dim: int

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            batch=BATCH,
            heads_q=HEADS,
            seqlen_q=LENGTH,
            seqlen_kv=LENGTH,
            head_dim=self.head_dim,
            dtype="bfloat16",
            block_mask="1",
        )

    def label(self) -> str:
        return f"{self.mask} D={self.head_dim}"


def cases(names: Sequence[str] = ()) -> Iterator[Case]:
    """Every mask of `names` at every head dimension; all masks where none is named."""
    for head_dim, name in product(HEAD_DIMS, MASKS):
        if not names or name in names:
            yield Case(name, head_dim)


def configs(problem: AttentionProblem) -> list[Config]:
    """Configs that are tried: those of `TILES` in which nothing spills, persistent and not."""
    found = []
    for (tile_n, buffers, stages), is_persistent in product(TILES, (True, False)):
        made = Config(
            FAMILY.name,
            {
                "warp_groups": 2,
                "tile_n": tile_n,
                "kv_stages": stages,
                "score_buffers": buffers,
                "q_in_registers": False,
                "persistent": is_persistent,
                "blocks_per_sm": 1,
                "splits": 1,
                "pdl": True,
                **({"early_exp": 0, "ping_pong": True} if buffers == 1 else {}),
                **({"stages_output": True} if is_persistent else {}),
            },
        )
        if FAMILY.accepts(problem, made, DEFAULT_GPU):
            found.append(made)
    return found


def short(config: Config) -> str:
    """A config for a table."""
    text = f"{config['tile_n']}/{config['score_buffers']}/{config['kv_stages']}"
    return text + (" persistent" if config["persistent"] else "")


def built(wanted: Sequence[Case]) -> dict[int, dict[Config, LoadedKernel]]:
    """The kernels of each head dimension, by config."""
    problems = {case.head_dim: case.problem for case in wanted}
    places = [
        (head_dim, config, FAMILY.kernels(problem, config)["attention"])
        for head_dim, problem in problems.items()
        for config in configs(problem)
    ]
    found: dict[int, dict[Config, LoadedKernel]] = {head_dim: {} for head_dim in problems}
    with Compiler(find_toolchain(), ArtifactCache()) as compiler:
        futures = compiler.submit([spec for _, _, spec in places])
        for (head_dim, config, _), (_, future) in zip(places, futures, strict=True):
            found[head_dim][config] = load(future.result())
    return found


class Tensors:
    """Queries, keys and values of a case, and its mask in every form."""

    def __init__(self, case: Case) -> None:
        """Args: case: what is computed."""
        import torch
        from torch.nn.attention.flex_attention import create_block_mask

        from tuner.runtime.attention.block_mask import tabulated

        seen = MASKS[case.mask]
        self.problem, self.scale = case.problem, case.head_dim**-0.5
        torch.manual_seed(0)
        shape = (BATCH, HEADS, LENGTH, case.head_dim)
        made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        self.query, self.key, self.value = made
        self.source = self.query.clone()
        self.block_mask = create_block_mask(
            lambda b, h, q, k: seen(q, k), None, None, LENGTH, LENGTH, device="cuda"
        )
        at = torch.arange(LENGTH, device="cuda")
        self.dense = seen(at[:, None], at[None])
        self.tables = tabulated(self.block_mask)

    def before(self, _: int) -> Any:
        """Writes the queries."""
        import torch

        return torch.add(self.source, 0.0, out=self.query)

    def own(self, kernel: LoadedKernel, config: Config) -> Contender:
        """A call of a kernel."""
        import torch

        (launch,) = FAMILY.launches(self.problem, config, self.scale)
        run = kernel.bind(launch.integers, launch.scalars)
        out = torch.empty_like(self.query)
        needed = max(1, kernel.workspace_bytes(launch.integers))
        workspace = torch.empty(needed, dtype=torch.uint8, device="cuda")
        fixed = [t.data_ptr() for t in (self.query, self.key, self.value, out)]
        addresses = [*fixed, 0, *(table.data_ptr() for table in self.tables)]

        def call(_: int) -> Any:
            run(addresses, workspace.data_ptr(), stream_of(out.device))
            return out

        return Contender(short(config), call)

    def flex(self) -> Contender:
        """FlexAttention, compiled."""
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        inputs = self.query, self.key, self.value
        return Contender(
            "flex", lambda _: compiled(*inputs, block_mask=self.block_mask, scale=self.scale)
        )

    def sdpa(self) -> Contender:
        """PyTorch's attention with the dense mask."""
        from torch.nn.functional import scaled_dot_product_attention

        inputs = self.query, self.key, self.value
        return Contender(
            "sdpa", lambda _: scaled_dot_product_attention(*inputs, self.dense, scale=self.scale)
        )


def compared(case: Case, kernels: Kernels, one_pass: bool = False) -> dict[str, Any]:
    """Times of one case, and how far the own output is from FlexAttention's.

    Args:
        case: mask and head dimension.
        kernels: own kernels to time.
        one_pass: time all own kernels beside the others; else only the fastest of a first pass.

    Raises:
        BenchmarkError: when no own kernel runs.
    """
    tensors = Tensors(case)
    own = {short(config): tensors.own(kernel, config) for config, kernel in kernels.items()}
    flex, sdpa = tensors.flex(), tensors.sdpa()
    first = time_calls([*own.values(), *([flex, sdpa] if one_pass else [])], tensors.before, 1)
    tried = {name: us for name, us in first.us.items() if name in own}
    if not tried:
        raise BenchmarkError(f"{case.label()}: no own kernel runs: {first.failed}")
    best = min(tried, key=lambda name: tried[name])
    wanted, got = flex.call(0).float(), own[best].call(0).float()
    error = float((got - wanted).norm() / wanted.norm())
    times: Times = first
    if not one_pass:
        times = time_calls([own[best], flex, sdpa], tensors.before, 1)
    us = {name: value for name, value in times.us.items() if name not in own}
    us["own"] = times.us[best]
    counts = tensors.tables.counts.sum((0, 1, 2)).tolist()
    return {
        "case": case.label(),
        "us": us,
        "tried_us": tried,
        "config": best,
        "failed": {**first.failed, **times.failed},
        "blocks": {"whole": counts[0], "part": counts[1]},
        "difference": error,
    }


def line(found: Mapping[str, Any]) -> str:
    """A row of the table."""
    us = found["us"]
    others = "".join(
        f" | {name} {us[name]:8.1f} us {us[name] / us['own']:6.3f}"
        for name in ("flex", "sdpa")
        if name in us
    )
    tail = f" | {found['config']} | off {found['difference']:.1e}"
    return f"{found['case']:16} own {us['own']:8.1f} us{others}{tail}"


def means(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """The others' times over the own ones: geometric mean and least, by head dimension."""
    lines = []
    for head_dim, name in product(HEAD_DIMS, ("flex", "sdpa")):
        ratios = [
            found["us"][name] / found["us"]["own"]
            for found in every
            if found["case"].endswith(f"D={head_dim}") and name in found["us"]
        ]
        if ratios:
            mean, least = statistics.geometric_mean(ratios), min(ratios)
            lines.append(f"D={head_dim:3} over {name}: mean {mean:.3f}, least {least:.3f}")
    return lines


def main(argv: Sequence[str]) -> int:
    """Compare, print, write.

    Raises:
        ConfigError: when a mask is not known.
        BenchmarkError: when torch sees no GPU.
    """
    parser = Parser(prog="scripts/bench masks", description=__doc__)
    parser.add_argument(
        "--mask",
        action="append",
        default=[],
        metavar="NAME",
        help="only this mask; may be repeated",
    )
    parser.add_argument(
        "--one-pass", action="store_true", help="time all own kernels beside the others"
    )
    parser.add_argument("--compile", action="store_true", help="compile the kernels, time nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--served", action="store_true", help="calls through the portfolio")
    args = parser.parse_args(argv)
    check_place(args.json)
    if unknown := set(args.mask) - set(MASKS):
        raise ConfigError(f"--mask {min(unknown)} is not known (allowed: {', '.join(MASKS)})")
    wanted = list(cases(args.mask))
    if args.compile:
        kernels = built(wanted)
        print(f"{sum(map(len, kernels.values()))} kernels are compiled")
        return 0
    need_gpu("--compile")

    if args.served:
        return _served(args.mask, args.json)
    kernels = built(wanted)
    environment = file_head.complete(family("vendor_sdpa").environment())
    every: list[dict[str, Any]] = []
    for case in wanted:
        every.append(compared(case, kernels[case.head_dim], args.one_pass))
        print(line(every[-1]), flush=True)
        if args.json is not None:
            write_json(args.json, {"environment": environment, "cases": every})
    print("\n".join(means(every)))
    return 0


def _served(names: Sequence[str], path: Path | None) -> int:
    """Time the calls of `masks_served`, print, write."""
    environment = file_head.complete(family("vendor_sdpa").environment())
    every: list[dict[str, Any]] = []
    for case in masks_served.cases(names):
        every.append(masks_served.timed(case, masks_served.Calls(case)))
        print(masks_served.line(every[-1]), flush=True)
        if path is not None:
            write_json(path, {"environment": environment, "cases": every})
    return 0
