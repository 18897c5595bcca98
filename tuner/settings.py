"""Every ``TUNER_*`` variable in one place, read when asked so that tests can set them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tuner.errors import ConfigError

VARIABLES: dict[str, str] = {
    "TUNER_CACHE_DIR": "folder of the store and the artifacts (default: the user cache folder)",
    "TUNER_STORE": "SQLAlchemy URL of the store for tuning (default: SQLite in TUNER_CACHE_DIR)",
    "TUNER_NVCC": "path of nvcc, before CUDA_HOME, PATH and the PyPI packages",
    "TUNER_CUTLASS_DIR": "a CUTLASS checkout to use instead of the nvidia-cutlass wheel",
    "TUNER_PEERS_PATH": "folder with peers to measure against: fa3.py, fa4.py, fa3_serving.py, ...",
    "TUNER_SAMPLER": "what searches: model (default), tpe, gp, cmaes, cost or random",
    "TUNER_OPTUNA_STORAGE": "URL or journal file that takes copies of the Optuna studies",
    "TUNER_READ_TOKEN": "bearer token to look things up in a service (`tuner serve`, `tuner sync`)",
    "TUNER_WRITE_TOKEN": "bearer token to submit and cancel jobs, too (`tuner serve`)",
    "TUNER_DISABLE": "1 sends every call of the runtime to PyTorch",
    "TUNER_BENCHMARK": "1 times the portfolio's kernels on the first call of an untuned shape",
    "TUNER_NVTX": "1 marks calls and timings with NVTX ranges, for Nsight Systems",
    "TUNER_VLLM_QUERIES": "most queries a sequence for the vLLM plug-in (default: all but e4m3 and "
    "slow chunks)",
    "TUNER_BUILD_ON_MISS": "1 lets the runtime have missing kernels compiled, in the background",
}


_IN_MEMORY = ("", "/", "/:memory:", "//:memory:", ":memory:")
"""Rest of an SQLite URL without a file."""


def _text(name: str) -> str | None:
    return os.environ.get(name) or None


def cache_dir() -> Path:
    """Folder of the live store and the artifacts; not created here."""
    if given := _text("TUNER_CACHE_DIR"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "cutlass-tuner"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cutlass-tuner"


def artifacts_dir() -> Path:
    """Folder of the compiled kernels."""
    return cache_dir() / "artifacts"


def kernels_dir() -> Path:
    """Folder of the lists of built kernels, a file for each compiler and compute capability."""
    return cache_dir() / "kernels"


def store_path() -> Path:
    """The default SQLite file, the one that the runtime reads."""
    return cache_dir() / "store.sqlite"


def store_url() -> str:
    """SQLAlchemy URL of the store for tuning.

    Raises:
        ConfigError: when TUNER_STORE names a database in memory.
    """
    url = _text("TUNER_STORE")
    return durable(url) if url else f"sqlite:///{store_path()}"


def durable(url: str) -> str:
    """The URL of a store that outlives its command.

    Raises:
        ConfigError: when it names a database in memory.
    """
    scheme, separator, rest = url.partition("://")
    place = rest.partition("?")[0]
    if separator and scheme.partition("+")[0] == "sqlite" and place in _IN_MEMORY:
        raise ConfigError(
            f"store '{url}' is a database in memory, which ends with the command "
            "(allowed: a path, sqlite:///PATH)"
        )
    return url


def nvcc() -> Path | None:
    """The compiler the user named."""
    return Path(p).expanduser() if (p := _text("TUNER_NVCC")) else None


def cutlass_dir() -> Path | None:
    """The CUTLASS checkout the user named."""
    return Path(p).expanduser() if (p := _text("TUNER_CUTLASS_DIR")) else None


def peers_path() -> Path | None:
    """Folder of modules to measure against."""
    return Path(p).expanduser() if (p := _text("TUNER_PEERS_PATH")) else None


def sampler() -> str | None:
    """The sampler the user named."""
    return _text("TUNER_SAMPLER")


def optuna_storage() -> str | None:
    """The Optuna storage that takes copies of the studies; None keeps none."""
    return _text("TUNER_OPTUNA_STORAGE")


def read_token() -> str:
    """The bearer token for looking; empty where none is set."""
    return os.environ.get("TUNER_READ_TOKEN", "")


def write_token() -> str:
    """The bearer token for submitting and cancelling; empty where none is set."""
    return os.environ.get("TUNER_WRITE_TOKEN", "")


def disabled() -> bool:
    """True when the runtime stands aside."""
    return os.environ.get("TUNER_DISABLE", "") not in ("", "0")


def benchmark() -> bool:
    """True when the runtime times untuned shapes on their first call."""
    return os.environ.get("TUNER_BENCHMARK", "") not in ("", "0")


def nvtx() -> bool:
    """True when what runs is marked for Nsight Systems."""
    return os.environ.get("TUNER_NVTX", "") not in ("", "0")


def build_on_miss() -> bool:
    """True when the runtime may start `tuner build` for a kernel that is not there."""
    return os.environ.get("TUNER_BUILD_ON_MISS", "") not in ("", "0")


def vllm_queries() -> int | None:
    """Queries of the longest sequence up to which the plug-in takes a call.

    None: any number, but neither caches of e4m3 nor chunks of prompts at D above 64.

    Raises:
        ConfigError: when the variable is not a whole number of 1 or more.
    """
    text = _text("TUNER_VLLM_QUERIES")
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"TUNER_VLLM_QUERIES={text} is out of range (allowed: 1 or more)")
    return int(text)
