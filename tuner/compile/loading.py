"""C interface of a compiled kernel, loaded into this process once it is verified."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

from tuner.base.ownership import trusted_sha256
from tuner.compile.artifacts import Artifact
from tuner.errors import BenchmarkError
from tuner.measurement import status_of


class LoadedKernel:
    """C interface of one loaded artifact; see `tuner.families.base.Launch`."""

    def __init__(self, key: str, library: Path) -> None:
        self.key = key
        try:
            self._library = ctypes.CDLL(str(library))
            self._workspace = self._library[f"tuner_{key}_workspace"]
            self._launch = self._library[f"tuner_{key}_launch"]
        except (OSError, AttributeError) as exc:
            raise BenchmarkError(f"kernel {key} cannot be loaded: {exc}") from exc
        for function in (self._workspace, self._launch):
            function.restype = ctypes.c_int
        self._workspace.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._launch.argtypes = [ctypes.c_void_p] * 5

    @property
    def address(self) -> int:
        """Address of the launch function in this process."""
        return int(ctypes.cast(self._launch, ctypes.c_void_p).value or 0)

    def workspace_bytes(self, integers: Sequence[int]) -> int:
        """Bytes of workspace that a launch with `integers` needs.

        Raises:
            BenchmarkError: when the kernel refuses these arguments.
        """
        needed = ctypes.c_int64(0)
        values = (ctypes.c_int64 * len(integers))(*integers)
        self._check("workspace", self._workspace(values, ctypes.byref(needed)))
        return needed.value

    def launch(
        self,
        tensors: Sequence[int],
        integers: Sequence[int],
        scalars: Sequence[float],
        workspace: int,
        stream: int,
    ) -> None:
        """Enqueue the kernel.

        Args:
            tensors: device addresses; 0 for a tensor that the kernel skips.
            integers: sizes, strides and flags, in the order of `KernelSpec.arguments`.
            scalars: factors, in that order.
            workspace: device address of `workspace_bytes` bytes.
            stream: CUstream handle.

        Raises:
            BenchmarkError: when CUDA or CUTLASS refuses; `status` says which kind.
        """
        self.bind(integers, scalars)(tensors, workspace, stream)

    def bind(
        self, integers: Sequence[int], scalars: Sequence[float]
    ) -> Callable[[Sequence[int], int, int], None]:
        """Bind these arguments; call the result as ``call(tensors, workspace, stream)``."""
        arguments = (
            (ctypes.c_int64 * len(integers))(*integers),
            (ctypes.c_double * len(scalars))(*scalars),
        )

        enqueue, (sizes, factors) = self._launch, arguments

        def launch(tensors: Sequence[int], workspace: int, stream: int) -> None:
            pointers = (ctypes.c_void_p * len(tensors))(*tensors)
            if code := enqueue(pointers, sizes, factors, workspace, stream):
                self._check("launch", code)

        return launch

    def _check(self, what: str, code: int) -> None:
        if code == 0:
            return
        if code < 0:
            name = _CUTLASS_STATUS.get(-code, "unknown")
            raise BenchmarkError(f"{what} of {self.key}: cutlass::Status {-code} ({name})")
        status = status_of(code).value
        raise BenchmarkError(f"{what} of {self.key}: cudaError {code}", status=status)


#: cutlass/cutlass.h, enum class Status.
_CUTLASS_STATUS = {
    1: "kErrorMisalignedOperand",
    2: "kErrorInvalidDataType",
    3: "kErrorInvalidLayout",
    4: "kErrorInvalidProblem",
    5: "kErrorNotSupported",
    6: "kErrorWorkspaceNull",
    7: "kErrorInternal",
    8: "kErrorArchMismatch",
    9: "kErrorInsufficientDriver",
    10: "kErrorMemoryAllocation",
    11: "kInvalid",
}

_loaded: dict[str, LoadedKernel] = {}


def load(artifact: Artifact) -> LoadedKernel:
    """Load the kernel of `artifact`, once a process. A library is never unloaded.

    Raises:
        BenchmarkError: when the library has changed since it was found, cannot be loaded, or lacks
            the interface.
    """
    kernel = _loaded.get(artifact.key)
    if kernel is None:
        verify(artifact)
        kernel = _loaded.setdefault(artifact.key, LoadedKernel(artifact.key, artifact.library))
    return kernel


def verify(artifact: Artifact) -> None:
    """Check that a library has not changed since its artifact was found, possibly by another
    process.

    Raises:
        BenchmarkError: when it has changed, or cannot be read.
    """
    try:
        is_same = trusted_sha256(artifact.library) == artifact.sha256
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise BenchmarkError(f"kernel {artifact.key} cannot be loaded: {reason}") from exc
    if not is_same:
        raise BenchmarkError(
            f"kernel {artifact.key} cannot be loaded: {artifact.library} is another library than "
            "when it was found"
        )


def loaded(key: str) -> LoadedKernel | None:
    """Kernel of an artifact that this process has already verified and loaded."""
    return _loaded.get(key)
