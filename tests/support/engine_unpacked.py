"""A pytest plugin that makes an unpacked wheel of an engine importable without its dependencies.

``ENGINE_UNPACKED`` names the folder. The Python of vLLM or SGLang is real; packages that it imports
and that are missing here are empty, as are its extensions.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

#: Top-level names that both engines import without a guard, and those of SGLang. vLLM has a guard
#: around Triton, whose classes PyTorch's own modules read.
IMPORTED = (
    "aiohttp cachetools cbor2 compressed_tensors cpuinfo einops llguidance msgspec openai "
    "openai_harmony partial_json_parser PIL psutil pybase64 xgrammar zmq"
).split()
SGLANGS = "gguf IPython sentencepiece sgl_kernel torchvision triton tvm_ffi".split()
FOLDER = Path(os.environ["ENGINE_UNPACKED"])
ABSENT = {*IMPORTED, *(SGLANGS if (FOLDER / "sglang").is_dir() else ())}


class _EmptyType(type):
    def __getattr__(cls, name: str) -> Any:
        return _empty(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class _Empty(metaclass=_EmptyType):
    """A class that accepts what a module does with it while it is imported."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Ignore the arguments."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Ignore the options."""

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        return _empty(name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:  # as a decorator
        return arguments[0] if arguments else self

    @classmethod
    def __get_pydantic_core_schema__(cls, *arguments: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


def _empty(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _EmptyType(name, (_Empty,), {})


class _EmptyModule(ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        value = _empty(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_wanted = fullname.partition(".")[0] in ABSENT
        return ModuleSpec(fullname, self, is_package=True) if is_wanted else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are made when they are read."""


sys.path.insert(0, str(FOLDER))
sys.meta_path.append(_Finder())
