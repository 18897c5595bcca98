"""Runs one kernel on one case and says what is wrong with it: numbers, bounds, repeatability."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tuner.families.base import LSE, SCRATCH
from tuner.measure.gate.kernels import GUARD_BYTES, POISON
from tuner.measure.subjects import WORKSPACE, Subject
from tuner.problem import Operand

from .cases import Case
from .reference import Difference, attention, difference, draw_inputs, lse_difference, strided

#: Largest relative Frobenius error, by type.
LIMITS = {"float16": 6e-4, "bfloat16": 5e-3}
#: A row's error may be this many times that: no row is hidden by the thousands beside it.
ROW_FACTOR = 5.0
LSE_LIMIT = 1e-4
#: Largest ratio to FlashAttention-2's own error, and what chance adds to it for few elements: the
#: root mean square of n independent errors is known to about 1 / sqrt(2 n), in both of them.
PEER_FACTOR = 1.2
PEER_CHANCE = 3.0
#: Launches whose results must be the same bits, and as many where an output is large.
REPEATS, FEW_REPEATS = 100, 2
#: Up to this many bytes of output, and operations, there are `REPEATS`.
REPEAT_BYTES = 80 << 20
REPEAT_FLOPS = 3e11
#: Pairs of launches, each on the other's output, and what they multiply the scale by: at the
#: scale itself each output is nearer to the mean of the values, and soon all are the same.
CHAIN = 3
CHAIN_SCALE = 16.0


@dataclass(frozen=True)
class Finding:
    """Result of one kernel on one case, which passed if `faults` is empty."""

    frobenius: float | None = None
    """Relative Frobenius error against fp64."""
    row: float | None = None
    """The worst row's relative error."""
    lse: float | None = None
    """Worst absolute error of the log-sum-exp; None where the kernel writes none."""
    peer: float | None = None
    """FlashAttention-2's relative Frobenius error; None where it does not take the input."""
    repeats: int = 0
    """Launches compared bit by bit with the first."""
    faults: list[str] = field(default_factory=list)


def judge(
    case: Case, found: Difference, lse: tuple[float, float] | None, peer: float | None
) -> list[str]:
    """What the numbers break."""
    limit = LIMITS[case.problem.dtype]
    faults = []
    if found.not_finite:
        faults.append(f"{found.not_finite} elements are not finite, or were never written")
    if not found.frobenius <= limit:
        faults.append(f"relative error {found.frobenius:.2e} (allowed {limit:.0e})")
    if not found.row <= ROW_FACTOR * limit:
        faults.append(f"a row is off by {found.row:.2e} (allowed {ROW_FACTOR * limit:.0e})")
    if peer is not None:
        chance = PEER_CHANCE / math.sqrt(case.problem.output.elements)
        if not found.frobenius <= PEER_FACTOR * (1 + chance) * peer:
            ratio = found.frobenius / peer if peer else math.inf
            faults.append(
                f"relative error {found.frobenius:.2e} is {ratio:.2f} of FlashAttention-2's "
                f"(allowed {PEER_FACTOR} and {chance:.1%} for chance)"
            )
    if lse is not None and not lse[1] <= LSE_LIMIT:
        faults.append(f"log-sum-exp off by {lse[0]:.2e} (allowed {LSE_LIMIT:.0e})")
    return faults


class Guarded:
    """Device memory between two bands, all of it poisoned."""

    def __init__(self, size: int, device: torch.device) -> None:
        even = size + size % 2
        self._whole = torch.empty(even + 2 * GUARD_BYTES, dtype=torch.uint8, device=device)
        self.bytes = self._whole[GUARD_BYTES : GUARD_BYTES + size]
        self.arm()

    def arm(self) -> None:
        self._whole.view(torch.int16).fill_(POISON)

    @property
    def strayed(self) -> int:
        """16-bit words of the bands that were written."""
        words = self._whole.view(torch.int16)
        band = GUARD_BYTES // 2
        return int((words[:band] != POISON).sum() + (words[-band:] != POISON).sum())


class Setting:
    """A case on the device: inputs between guard bands, the reference, the peer's error."""

    def __init__(
        self, case: Case, device: torch.device, peer: Callable[..., Tensor] | None = None
    ) -> None:
        self.case, self.device = case, device
        problem = case.problem
        self.guards = {o.name: Guarded(o.bytes, device) for o in problem.operands[:-1]}
        self.inputs = {o.name: strided(o, self.guards[o.name].bytes) for o in problem.operands[:-1]}
        draw_inputs(case, self.inputs)
        self._sums = self._checksums()
        self.reference = attention(case, self.inputs)
        self.peer = None
        if peer is not None:
            error = difference(peer(*self.inputs.values()), self.reference).frobenius
            self.peer = error if math.isfinite(error) else None

    def _checksums(self) -> dict[str, int]:
        return {
            name: int(guard.bytes.view(torch.int16).sum(dtype=torch.int64))
            for name, guard in self.guards.items()
        }

    def prove(self, subject: Subject, writes_lse: bool, settle: Callable[[], None]) -> Finding:
        """Everything that is asked of a kernel.

        Args:
            subject: the kernel, bound by device addresses.
            writes_lse: it takes `LSE` among its buffers.
            settle: waits for all it has enqueued; raises what went wrong.
        """
        return _Proof(self, subject, writes_lse, settle).run()

    def strayed(self) -> list[str]:
        """Inputs that were changed, or beside which something was written."""
        faults = [f"{2 * g.strayed} bytes beside {n}" for n, g in self.guards.items() if g.strayed]
        sums = self._checksums()
        return faults + [f"input {name}" for name in sums if sums[name] != self._sums[name]]


class _Proof:
    def __init__(
        self, setting: Setting, subject: Subject, writes_lse: bool, settle: Callable[[], None]
    ) -> None:
        self.setting, self.subject, self.settle = setting, subject, settle
        self.writes_lse = writes_lse
        problem, device = setting.case.problem, setting.device
        self.out: Operand = problem.output
        shape = problem.output.shape[:3]
        self.lse = Operand(LSE, shape, (shape[1] * shape[2], shape[2], 1), "float32", True)
        self.own = {
            SCRATCH: Guarded(subject.scratch_bytes, device),
            WORKSPACE: Guarded(subject.workspace_bytes, device),
        }
        self.results = {
            "out": Guarded(self.out.bytes, device),
            LSE: Guarded(self.lse.bytes if writes_lse else 0, device),
        }

    def run(self) -> Finding:
        case = self.setting.case
        out, lse = self.results["out"].bytes, self.results[LSE].bytes
        self._bind(out, lse if self.writes_lse else None)()
        self.settle()
        found = difference(strided(self.out, out), self.setting.reference)
        lse_found = None
        if self.writes_lse:
            lse_found = lse_difference(strided(self.lse, lse), self.setting.reference)
        faults = judge(case, found, lse_found, self.setting.peer)
        touched = self.setting.strayed() + [
            f"{2 * guard.strayed} bytes beside {name}"
            for name, guard in {**self.results, **self.own}.items()
            if guard.strayed
        ]
        if touched:
            faults.append(f"written: {', '.join(touched)}")
        repeats = 0
        if not faults:  # a wrong result is not worth repeating
            frequent = self.out.bytes <= REPEAT_BYTES and case.problem.flops <= REPEAT_FLOPS
            repeats = REPEATS if frequent else FEW_REPEATS
            faults += self._repeat(repeats)
            if frequent:
                faults += self._chain()
        return Finding(
            found.frobenius,
            found.row,
            None if lse_found is None else lse_found[0],
            self.setting.peer,
            repeats,
            faults,
        )

    def _bind(
        self, out: Tensor, lse: Tensor | None, query: Tensor | None = None, factor: float = 1.0
    ) -> Callable[[], None]:
        """One launch; with a null pointer where no log-sum-exp is wanted."""
        buffers: Mapping[str, Tensor] = {
            **{name: guard.bytes for name, guard in self.setting.guards.items()},
            **{name: guard.bytes for name, guard in self.own.items()},
            self.out.name: out,
        }
        addresses = {name: tensor.data_ptr() for name, tensor in buffers.items()}
        addresses[LSE] = 0 if lse is None else lse.data_ptr()
        if query is not None:
            addresses["query"] = query.data_ptr()
        return self.subject.bind(addresses, factor * self.setting.case.scale)

    def _replay(self, calls: Sequence[Callable[[], None]]) -> None:
        """As one CUDA graph: nothing is as close behind one another."""
        graph = self.subject.capture(calls)
        graph.replay()
        self.settle()
        graph.close()

    def _repeat(self, count: int) -> list[str]:
        """The same bits `count` times, one half launched one by one, the other in a graph: all in
        one workspace, as a model calls it, each into an output of its own, and every second one
        without a log-sum-exp.
        """
        first, first_lse = self.results["out"].bytes, self.results[LSE].bytes
        outs, lses = _rows(count, first), _rows(count, first_lse)
        calls = [
            self._bind(outs[index], lses[index] if self._wants_lse(index) else None)
            for index in range(count)
        ]
        for call in calls[: count // 2]:
            call()
        self.settle()
        for guard in self.own.values():
            guard.arm()  # what a workspace holds must not matter, either way
        self.settle()
        self._replay(calls[count // 2 :])
        faults = []
        other = [i for i in range(count) if not torch.equal(outs[i], first)]
        if other:
            faults.append(f"{len(other)} of {count} repetitions differ, first {other[0]}")
        other = [i for i in range(count) if self._wants_lse(i)]
        other = [i for i in other if not torch.equal(lses[i], first_lse)]
        if other:
            faults.append(f"log-sum-exp of {len(other)} of {count} repetitions differs")
        return faults

    def _wants_lse(self, index: int) -> bool:
        return self.writes_lse and index % 2 == 0

    def _chain(self) -> list[str]:
        """Each launch reads what the last one wrote, and overwrites what that read: the same
        whether one waits in between or not.
        """
        ends = []
        for waits in (True, False):
            query = self.setting.guards["query"].bytes.clone()
            out = torch.empty_like(query)
            forth = self._bind(out, None, query, CHAIN_SCALE)
            back = self._bind(query, None, out, CHAIN_SCALE)
            self.settle()
            if waits:
                for call in [forth, back] * CHAIN:
                    call()
                    self.settle()
            else:
                self._replay([forth, back] * CHAIN)
            ends.append(query)
        same = torch.equal(*ends)
        return [] if same else ["launches on each other's outputs differ without waiting"]


def _rows(count: int, like: Tensor) -> Tensor:
    """`count` buffers of that size, aligned as an allocation of their own would be."""
    size = math.ceil(len(like) / 256) * 256
    rows = torch.full((count, size), 0xA5, dtype=torch.uint8, device=like.device)
    return rows[:, : len(like)]
