"""A cuBLASLt that is not there: its C functions in Python, over tensors of the CPU."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tuner.families.peers.lt import Algorithm

VERSION = 130100
NOT_SUPPORTED = 15
DTYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16, 28: torch.float8_e4m3fn}
#: Bytes of each attribute, as cublasLt.h has them.
DESCRIPTION = {3: 4, 4: 4, 7: 4, 8: 8, 17: 8, 18: 8, 25: 1, 26: 4, 31: 4, 32: 4}
LAYOUT = {5: 4, 6: 8}
PREFERENCE = {1: 8, 5: 4, 6: 4, 7: 4, 8: 4}
CONFIG = {0: 4, 1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4, 7: 2, 8: 2}
#: Workspace by the algorithm's id; those that the heuristic returns, each twice.
WORKSPACES = {21: 0, 66: 4096, 67: 1 << 24}


def of(reference: Any) -> Any:
    """Target of a pointer made by `ctypes.byref`."""
    return reference._obj


class Things(dict[int, Any]):
    """Descriptors by their address, none of which comes twice."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def make(self, where: Any, thing: Any) -> int:
        of(where).value = address = 64 * next(self._numbers)
        self[address] = thing
        return 0


class FakeLt:
    """Functions by their C names. `launched` holds the ids of algorithms and their workspaces."""

    def __init__(self) -> None:
        self.things = Things()
        self.version = VERSION
        self.launched: list[tuple[int, int, int]] = []
        self.destroyed = 0

    def cublasLtGetVersion(self) -> int:
        return self.version

    def cublasLtCreate(self, where: Any) -> int:
        return self.things.make(where, "handle")

    def cublasLtMatmulDescCreate(self, where: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self.things.make(where, {3: 0, 4: 0, 7: 1, 31: 0, 32: 0})

    def cublasLtMatrixLayoutCreate(
        self, where: Any, kind: int, rows: int, columns: int, pitch: int
    ) -> int:
        assert pitch == rows
        return self.things.make(where, {"kind": kind, "rows": rows, "columns": columns})

    def cublasLtMatmulPreferenceCreate(self, where: Any) -> int:
        return self.things.make(where, {})

    def _put(self, sizes: dict[int, int], where: Any, attribute: int, value: Any, size: int) -> int:
        assert size == sizes[attribute] == ctypes.sizeof(of(value))
        self.things[where.value][attribute] = of(value).value
        return 0

    def cublasLtMatmulDescSetAttribute(self, *arguments: Any) -> int:
        return self._put(DESCRIPTION, *arguments)

    def cublasLtMatrixLayoutSetAttribute(self, *arguments: Any) -> int:
        return self._put(LAYOUT, *arguments)

    def cublasLtMatmulPreferenceSetAttribute(self, *arguments: Any) -> int:
        return self._put(PREFERENCE, *arguments)

    def _destroy(self, where: Any) -> int:
        del self.things[where.value]
        self.destroyed += 1
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = _destroy
    cublasLtMatmulPreferenceDestroy = _destroy

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, description: Any, *further: Any) -> int:
        *_, preference, count, found, returned = further
        wanted = self.things[preference.value]
        assert {wanted[n] for n in (5, 6, 7, 8)} == {16}, "any address that TMA can read"
        known = [name for name, size in WORKSPACES.items() if size <= wanted[1] for _ in range(2)]
        for place, name in zip(found, known, strict=False):
            write(place.algorithm, 0, name)
            write(place.algorithm, 8, name % 7)
            place.workspace_bytes = WORKSPACES[name]
        of(returned).value = min(count, len(known))
        return 0 if known else NOT_SUPPORTED

    def cublasLtMatmulAlgoInit(self, handle: Any, *further: Any) -> int:
        *_, name, where = further
        write(of(where), 0, name)
        return 0 if name in WORKSPACES else NOT_SUPPORTED

    def cublasLtMatmulAlgoCheck(self, handle: Any, *further: Any) -> int:
        *_, algorithm, found = further
        of(found).workspace_bytes = WORKSPACES[read(of(algorithm), 0)]
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(
        self, algorithm: Any, number: int, value: Any, size: int, written: Any
    ) -> int:
        assert size == CONFIG[number] == ctypes.sizeof(of(value))
        of(value).value = read(of(algorithm), number)
        return 0

    def cublasLtMatmulAlgoConfigSetAttribute(
        self, algorithm: Any, number: int, value: Any, size: int
    ) -> int:
        assert size == CONFIG[number] == ctypes.sizeof(of(value))
        write(of(algorithm), number, of(value).value)
        return 0

    def cublasLtMatmul(
        self, handle: Any, description: Any, alpha: Any, a: int, a_layout: Any, b: int,
        b_layout: Any, beta: Any, c: int, c_layout: Any, d: int, d_layout: Any, algorithm: Any,
        workspace: int, size: int, stream: int,
    ) -> int:  # fmt: skip
        wanted = self.things[description.value]
        self.launched.append((read(of(algorithm), 0), size, workspace))
        left, right = (self._matrix(*one) for one in ((a, a_layout), (b, b_layout)))
        left = left.mT if wanted[3] else left
        right = right.mT if wanted[4] else right
        product = of(alpha).value * (left @ right)
        if 17 in wanted:
            is_vector = wanted[31] == wanted[32] == 3
            rows, columns = product.shape[-2:] if is_vector else (1, 1)
            product = product * tensor(wanted[17], torch.float32, rows).view(-1, 1)
            product = product * tensor(wanted[18], torch.float32, columns)
        if of(beta).value:  # C is not read else
            product = product + of(beta).value * self._matrix(c, c_layout)
        epilogue = wanted[7]
        if epilogue & 4:
            bias = tensor(wanted[8], DTYPES[wanted[26]], product.shape[-2])
            product = product + bias.double().view(-1, 1)
        if epilogue & 2:
            product = product.relu()
        if epilogue & 32:
            product = torch.nn.functional.gelu(product, approximate="tanh")
        out = self._matrix(d, d_layout, as_they_are=True)
        out.copy_(product)
        return 0

    def _matrix(self, address: int, layout: Any, as_they_are: bool = False) -> Any:
        """(batch, rows, columns) by columns, in fp64 unless `as_they_are`."""
        facts = self.things[layout.value]
        rows, columns, batch = facts["rows"], facts["columns"], facts.get(5, 1)
        stride = facts.get(6, rows * columns)
        flat = tensor(address, DTYPES[facts["kind"]], batch * stride)
        seen = flat.as_strided((batch, rows, columns), (stride, 1, rows))
        return seen if as_they_are else seen.double()


def tensor(address: int, dtype: Any, count: int) -> Any:
    """Memory as a tensor."""
    size = count * torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def read(algorithm: Algorithm, number: int) -> int:
    """An attribute of an opaque algorithm: 32 bits each, the last beside the first."""
    words: Sequence[int] = algorithm.data
    return (words[number % 8] >> (32 * (number // 8))) & 0xFFFFFFFF


def write(algorithm: Algorithm, number: int, value: int) -> None:
    shift = 32 * (number // 8)
    kept = algorithm.data[number % 8] & ~(0xFFFFFFFF << shift)
    algorithm.data[number % 8] = kept | value << shift
