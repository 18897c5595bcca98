"""Import paths of earlier releases, each another name of the module that took its place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PATHS = {
    "tuner.runtime.context_parallel": "tuner.runtime.parallel.context_parallel",
    "tuner.runtime.distributed": "tuner.runtime.parallel.distributed",
    "tuner.runtime.paged": "tuner.runtime.attention.paged",
    "tuner.runtime.sparse": "tuner.runtime.attention.sparse",
    "tuner.runtime.transformers": "tuner.runtime.engines.transformers",
    "tuner.runtime.transformers_experts": "tuner.runtime.engines.transformers_experts",
    "tuner.runtime.vllm": "tuner.runtime.engines.vllm",
}
"""Today's path of each module, or package with all of its modules, by its former path."""


class _FormerPaths(MetaPathFinder, Loader):
    """Finds the module of a former path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        names = fullname.split(".")
        today = PATHS.get(".".join(names[:3]))
        if today is None:
            return None
        return ModuleSpec(fullname, self, origin=".".join([today, *names[3:]]))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__  # in whose place Python puts `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


# Before Python's own: they would load the modules of a package a second time.
sys.meta_path.insert(0, _FormerPaths())
