"""Decoding of latent attention over pages of 64 rows, for `scripts/bench paged --preset mla`.

`tuner.mla_decode` beside FlashMLA's kernel for Hopper, as sgl-flash-mla has it, with its schedule
made before, and beside PyTorch: pages gathered, two batched products, a softmax. Rows are bf16, or
e4m3 in a form that the tuner reads; the others then have what it stands for in bf16. Caches below
200 MB are rotated.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import harness
from benchmarks.harness import Contender, Row
from tuner.errors import BenchmarkError
from tuner.families.peers import installed
from tuner.problem.attention import LATENT_BLOCK, LATENT_BLOCKS_BYTES
from tuner.problem.attention import LATENT_DIM as WIDTH
from tuner.problem.attention import LATENT_VALUE_DIM as LATENT

PEER = "flash_mla"
SIZE = 64
"""Slots of a page, the only number that FlashMLA takes."""
ROTATED, MAX_COPIES = 200 << 20, 8
"""Bytes that the rotated caches have together, and their number at most."""
BUDGET_US = 3e5
LIMIT = 8e-3
"""Largest relative difference to PyTorch's output in fp32."""


@dataclass(frozen=True)
class Case:
    """Sequences of as many rows, or of unlike numbers around it."""

    sequences: int
    length: int
    heads: int
    queries: int = 1
    is_mixed: bool = False
    form: str = ""

    @property
    def group(self) -> str:
        if self.form:
            return f"rows of {self.form}"
        rows_of = "few" if self.heads * self.queries <= 64 else "many"
        size = "256 MB and more" if sum(self.lengths) * ROW_BYTES[""] >= 256e6 else "smaller caches"
        return f"{rows_of} rows, {size}"

    @property
    def label(self) -> str:
        unlike = ", unlike" if self.is_mixed else ""
        form = f", {self.form}" if self.form else ""
        sizes = f"{self.sequences} x {self.length}{unlike}, {self.heads} heads, {self.queries}"
        return f"{sizes}{form}"

    @property
    def lengths(self) -> list[int]:
        """Rows of each sequence, from a quarter of `length` to seven quarters where unlike."""
        if not self.is_mixed:
            return [self.length] * self.sequences
        parts = (0.25 + 1.5 * (61 * i % 97) / 97 for i in range(self.sequences))
        return [max(1, int(self.length * part)) for part in parts]


_ALIKE: tuple[tuple[int, int, int, int], ...] = (
    *((128, 4096, heads, 1) for heads in (16, 32, 64, 128)),
    *((1, length, 128, 1) for length in (1024, 8192, 65536)),
    *((1, length, 16, 1) for length in (1024, 65536)),
    *((16, 4096, heads, 1) for heads in (16, 128)),
    *((32, 16384, 64, 1), (64, 8192, 128, 1), (4, 32768, 128, 1)),
    *((64, 4096, 16, 4), (64, 4096, 128, 2), (32, 4096, 128, 4)),
)
_UNLIKE: tuple[tuple[int, int, int, int], ...] = (
    *((128, 4096, heads, 1) for heads in (32, 64, 128)),
    *((64, 2048, heads, 1) for heads in (16, 128)),
)
_QUANTISED = ((128, 4096, 16), (128, 4096, 64), (128, 4096, 128), (16, 4096, 16), (1, 65536, 128))
ROW_BYTES = {"": 2 * WIDTH, "e4m3": WIDTH, "e4m3_blocks": LATENT_BLOCKS_BYTES}
"""Bytes of a row, by the cache's form."""
CASES = [Case(*sizes) for sizes in _ALIKE] + [Case(*sizes, is_mixed=True) for sizes in _UNLIKE]
CASES += [Case(*sizes, form=form) for form in list(ROW_BYTES)[1:] for sizes in _QUANTISED]


class Tensors:
    """Tensors of a case, on pages in a shuffled order."""

    def __init__(self, case: Case, seed: int) -> None:
        import torch

        torch.manual_seed(seed)
        counts = [-(-length // SIZE) for length in case.lengths]
        columns = max(counts)
        self.cache = torch.randn(sum(counts), SIZE, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.descale = torch.ones(1, device="cuda") if case.form == "e4m3" else None
        self.rows = self.cache
        if case.form:
            self.rows, self.cache = quantised(self.cache, case.form)
        order = torch.randperm(sum(counts)).int()
        table = torch.zeros(len(counts), columns, dtype=torch.int32)
        for row, pages in zip(table, order.split(counts), strict=True):
            row[: len(pages)] = pages
        self.table = table.to("cuda")
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
        shape = case.sequences, case.queries, case.heads, WIDTH
        self.query = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.source = self.query.clone()
        seen = self.lengths[:, None] - case.queries + 1 + torch.arange(case.queries, device="cuda")
        place = torch.arange(columns * SIZE, device="cuda")
        self.hidden = place >= seen[..., None]  # (sequences, queries, keys)

    def pytorch(self, scale: float) -> Any:
        """The output by PyTorch's operations, for any lengths."""
        import torch

        batch, queries, heads, _ = self.query.shape
        latent = self.cache[self.table.long()].flatten(1, 2)
        scores = torch.bmm(self.query.flatten(1, 2), latent.mT).view(batch, queries, heads, -1)
        scores = scores.float().mul_(scale).masked_fill_(self.hidden[:, :, None], -torch.inf)
        weights = torch.softmax(scores, -1).to(latent.dtype).flatten(1, 2)
        return torch.bmm(weights, latent[..., :LATENT]).view(batch, queries, heads, LATENT)


def quantised(cache: Any, form: str) -> tuple[Any, Any]:
    """Rows of a form, and what they stand for in bf16."""
    import torch

    if form == "e4m3":
        rows = cache.to(torch.float8_e4m3fn)
        return rows, rows.bfloat16()
    latent, rotary = cache.split((LATENT, WIDTH - LATENT), -1)
    blocks = latent.unflatten(-1, (-1, LATENT_BLOCK))
    factors = blocks.abs().amax(-1, keepdim=True).float() / 448
    elements = (blocks / factors).to(torch.float8_e4m3fn)
    parts = elements.flatten(-2), factors.flatten(-2), rotary
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    exact = (elements.float() * factors).bfloat16().flatten(-2)
    return rows, torch.cat((exact, rotary), -1)


def peer_of(case: Case, tensors: Sequence[Tensors], scale: float) -> Callable[[int], Any] | str:
    """FlashMLA's call, or the reason why it is not here."""
    module = installed.module_of(PEER)
    if isinstance(module, str):
        return module
    schedules = [module.get_mla_metadata()[0] for _ in tensors]

    def call(i: int) -> Any:
        one = tensors[i]
        caches = one.cache.unsqueeze(2), one.table, one.lengths
        options = {"softmax_scale": scale, "causal": case.queries > 1, "use_legacy": True}
        return module.flash_mla_with_kvcache(one.query, *caches, LATENT, schedules[i], **options)[0]

    return call


def measure(case: Case, _: Namespace) -> Row:
    """Microseconds of each way for one case, and errors against PyTorch's operations.

    Raises:
        BenchmarkError: when the kernel does not serve the case.
    """
    import torch

    import tuner
    from tuner.runtime.attention import mla
    from tuner.runtime.call import counters

    moved, scale = sum(case.lengths) * ROW_BYTES[case.form], WIDTH**-0.5
    copies = 1 if moved >= ROTATED else min(MAX_COPIES, max(2, ROTATED // moved))
    tensors = [Tensors(case, seed) for seed in range(copies)]

    def own(i: int) -> Any:
        one = tensors[i]
        inputs = one.query, one.rows, one.table, one.lengths
        return tuner.mla_decode(*inputs, scale=scale, descale=one.descale)

    first = tensors[0]
    counters.stats(reset=True)
    out = own(0)
    if reasons := counters.stats().fallbacks:
        raise BenchmarkError(f"no kernel answers: {', '.join(reasons)}")
    calls: dict[str, Callable[[int], Any]] = {}
    calls |= {"pytorch": lambda i: tensors[i].pytorch(scale), "tuner": own}
    peer = peer_of(case, tensors, scale)
    failed = {PEER: peer} if isinstance(peer, str) else {}
    if not isinstance(peer, str):
        calls[PEER] = peer
        for i in range(copies):
            peer(i)
    outs, lost = harness.first_outputs(calls)
    tables = first.query, first.cache, first.table, first.lengths
    wanted = mla.Decode(*tables, scale, torch.empty_like(out), None)
    mla.composed(wanted)
    errors = {name: harness.distance(found, wanted.out) for name, found in outs.items()}
    contenders = [Contender(name, calls[name]) for name in outs]

    def write(i: int) -> Any:
        return torch.add(tensors[i].source, 0.0, out=tensors[i].query)

    times = harness.time_calls(contenders, write, copies, BUDGET_US)
    return {
        **{"bytes": moved, "us": times.us, "errors": errors},
        "flops": 2.0 * case.heads * case.queries * sum(case.lengths) * (WIDTH + LATENT),
        "failed": {**failed, **lost, **times.failed},
        "wrong": [name for name, error in errors.items() if not error <= LIMIT],
    }
