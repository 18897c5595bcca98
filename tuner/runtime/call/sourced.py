"""Kernels of a `Source`: loaded once a device, and compared with PyTorch's operations before that.

``tuner build`` builds them. A kernel whose results are not PyTorch's is not launched.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from tuner.base import document, forks
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.loading import LoadedKernel, load
from tuner.compile.single import Source
from tuner.errors import TunerError
from tuner.hardware import HOPPER
from tuner.runtime.call import counters, devices

_log = logging.getLogger("tuner.runtime")


class SourcedKernel:
    """The kernel of a source, by device.

    Args:
        source: source of the kernel.
        otherwise: name of the fallback, for log messages.
    """

    _lock: threading.Lock

    def __init__(self, source: Source, otherwise: str) -> None:
        self.source, self._otherwise = source, otherwise
        forks.add_lock(self)
        self._known: dict[torch.device, LoadedKernel | None] = {}

    def of(
        self, device: torch.device, is_proven: Callable[[LoadedKernel], bool]
    ) -> LoadedKernel | None:
        """The kernel of a device; None where it is not served.

        It is loaded and proven at the first call that is not captured in a graph.

        Args:
            device: device that it is launched on.
            is_proven: True when the loaded kernel has the results of PyTorch's operations there.
        """
        if device in self._known:
            return self._known[device]
        try:
            artifact = self.source.find(ArtifactCache())
        except (TunerError, *document.FAULTS) as exc:
            counters.count_error(f"{self._otherwise}: {exc}")
            artifact = None
        if artifact is not None and devices.is_capturing():
            return None
        with self._lock:
            if device not in self._known:
                kernel: LoadedKernel | None = None
                try:
                    if artifact is not None and _is_hopper(device):
                        loaded = load(artifact)
                        kernel = loaded if is_proven(loaded) else None
                        if kernel is None:
                            _log.warning("%s: its results are not theirs", self._otherwise)
                except TunerError as exc:
                    _log.warning("%s: %s", self._otherwise, exc)
                self._known[device] = kernel
        return self._known[device]

    def forget(self) -> None:
        """Look for the kernel again at the next call of each device."""
        self._known.clear()


def _is_hopper(device: torch.device) -> bool:
    return devices.gpu_of(device.index).compute_capability == HOPPER
