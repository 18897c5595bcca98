"""Entry of newly built kernels in a kernel list: proofs are carried over, better rows stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tuner.compile.artifacts import Artifact
from tuner.families.base import KernelSpec
from tuner.selection.kernel_list import Kernel, KernelList
from tuner.selection.kernels import artifact_of, read, shipped_kernels, update
from tuner.tuning.proof import EarlierProofs


class BuiltKernels:
    """Enters built kernels in a list, one by one.

    A kernel takes over a proof of its spec and machine code, unless either failed here. Without one
    it does not replace a proven kernel that is served, as one of another CUTLASS or of other
    options of nvcc.

    Args:
        path: file of the list.
        force: replace in every case.

    Raises:
        ConfigError: when the list cannot be read.
    """

    def __init__(self, path: Path, *, force: bool) -> None:
        self._path, self._force = path, force
        self._before = read(path)
        self._proofs = EarlierProofs([*self._before.kernels.values(), *shipped_kernels()])
        self.carried = 0
        """Kernels whose proof is of another artifact."""
        self.stayed = 0
        """Proven kernels that stay in the list in place of new ones without a proof."""

    def enter(self, spec: KernelSpec, artifact: Artifact) -> None:
        """Enter a kernel, unless a better one is there.

        Raises:
            StoreError: when the list cannot be written.
        """
        code = artifact.code if self._proofs.has(spec.key) else ""
        proof = self._proofs.find(spec.key, artifact.key, code)
        kernel = Kernel.of(spec, artifact)
        if any(name in self._before.faults for name in kernel.identities):
            proof = None
        if proof is None and not self._force and self._is_served_otherwise(spec, artifact):
            self.stayed += 1
            return
        self.carried += proof is not None and bool(proof.carried)

        def change(kernels: KernelList) -> KernelList:
            is_failed = any(name in kernels.faults for name in kernel.identities)
            added = kernel if is_failed else replace(kernel, proof=proof)
            return kernels.with_kernels([added]).with_verdicts(shipped_kernels())

        update(self._path, change)

    def _is_served_otherwise(self, spec: KernelSpec, artifact: Artifact) -> bool:
        """True where the list has a proven kernel of the spec, and its artifact is present."""
        kernel = self._before.find(spec)
        if kernel is None or kernel.proof is None or kernel.artifact == artifact.key:
            return False
        return artifact_of(self._before, kernel) is not None
