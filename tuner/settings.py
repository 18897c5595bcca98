"""Every ``TUNER_*`` variable in one place, read when asked so that tests can set them."""

from __future__ import annotations

import os
import stat
import sys
from functools import cache
from pathlib import Path

from tuner.errors import ConfigError

VARIABLES: dict[str, str] = {
    "TUNER_CACHE_DIR": "folder of the store and the artifacts (default: the user cache folder)",
    "TUNER_TRUST_CACHE": "a group, by name or number, whose members may write the artifacts",
    "TUNER_STORE": "SQLAlchemy URL of the store for tuning (default: SQLite in TUNER_CACHE_DIR)",
    "TUNER_NVCC": "path of nvcc, before CUDA_HOME, PATH and the PyPI packages",
    "TUNER_CUTLASS_DIR": "a CUTLASS checkout to use instead of the nvidia-cutlass wheel",
    "TUNER_PEERS_PATH": "folder with peers to measure against: fa3.py, fa4.py, fa3_serving.py, ...",
    "TUNER_SAMPLER": "what searches: model (default), tpe, gp, cmaes, cost or random",
    "TUNER_OPTUNA_STORAGE": "URL or journal file that takes copies of the Optuna studies",
    "TUNER_READ_TOKEN": "bearer token to read a service (`tuner serve`, `tuner store sync`)",
    "TUNER_WRITE_TOKEN": "bearer token to submit and cancel jobs, too (`tuner serve`)",
    "TUNER_DISABLE": "1 sends every call of the runtime to PyTorch",
    "TUNER_BATCH_INVARIANT": "1 gives a row the same bits in any batch, or an error",
    "TUNER_BENCHMARK": "1 times the portfolio's kernels on the first call of an untuned shape",
    "TUNER_NVTX": "1 marks calls and timings with NVTX ranges, for Nsight Systems",
    "TUNER_ANSWERS": "who may answer calls, as own,pytorch,flash3 (default: all; own and pytorch "
    "always may)",
    "TUNER_VLLM_QUERIES": "most queries a sequence for the vLLM plug-in (default: all but e4m3 and "
    "slow chunks)",
    "TUNER_SGLANG_QUERIES": "as TUNER_VLLM_QUERIES, for the SGLang plug-in",
    "TUNER_VLLM_LINEAR": "1 puts own kernels before vLLM's for e4m3 weights with factors of blocks",
    "TUNER_VLLM_MLA": "1 puts own decoding of latent attention before vLLM's TRITON_MLA",
    "TUNER_BUILD_ON_MISS": "0 has no missing kernels compiled in the background",
}

ALWAYS_ANSWER = "own", "pytorch"
ANSWERS = (*ALWAYS_ANSWER, "flash3", "flash4", "cudnn", "cublaslt")
"""Words of TUNER_ANSWERS. The last two mean libraries' plans and algorithms that PyTorch does not
choose."""
_NAME = "cutlass-tuner"
NOWHERE = Path("/nonexistent") / _NAME
"""Cache folder of a user who can have none: readers find nothing, and writers say so."""


_IN_MEMORY = ("", "/", "/:memory:", "//:memory:", ":memory:")
"""Rest of an SQLite URL without a file."""


def _text(name: str) -> str | None:
    return os.environ.get(name) or None


def expanded(path: str, name: str) -> Path:
    """A path with the home folder in place of a leading ``~``.

    Args:
        path: path as the user wrote it.
        name: variable or option that it comes from, for the message.

    Raises:
        ConfigError: when this user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        raise ConfigError(f"{name}={path}: there is no home folder (write the whole path)") from exc


def _path(name: str) -> Path | None:
    return expanded(text, name) if (text := _text(name)) else None


def cache_dir() -> Path:
    """Folder of the live store and the artifacts; not created here.

    A user without a home folder, as in a container without HOME, has a private folder among the
    temporary files. If none can be made it is `NOWHERE`.

    Raises:
        ConfigError: when ``TUNER_CACHE_DIR`` needs a home folder, and there is none.
    """
    if (folder := _path("TUNER_CACHE_DIR")) is not None:
        return folder
    base = os.environ.get("XDG_CACHE_HOME")
    if base and sys.platform != "darwin":
        return Path(base) / _NAME
    try:
        home = Path.home()
    except RuntimeError:
        return _private_folder()
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / _NAME


def _private_folder() -> Path:
    """This user's folder among the temporary files, made here; `NOWHERE` where another user has
    taken its name.
    """
    import tempfile

    try:
        folder = Path(tempfile.gettempdir()) / f"{_NAME}-{os.geteuid()}"
        folder.mkdir(0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError:
        return NOWHERE
    is_private = stat.S_ISDIR(facts.st_mode) and not stat.S_IMODE(facts.st_mode) & 0o077
    return folder if is_private and facts.st_uid == os.geteuid() else NOWHERE


def trusted_group() -> int | None:
    """Number of the group whose members may write the artifacts; None: only this user may.

    Raises:
        ConfigError: when this machine has no such group.
    """
    name = _text("TUNER_TRUST_CACHE")
    if name is None:
        return None
    if name.isdecimal():
        return int(name)
    import grp

    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as exc:
        raise ConfigError(
            f"TUNER_TRUST_CACHE={name} is not a group here (allowed: a group's name or number)"
        ) from exc


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
    scheme, separator, address = url.partition("://")
    place = address.partition("?")[0]
    if separator and scheme.partition("+")[0] == "sqlite" and place in _IN_MEMORY:
        raise ConfigError(
            f"store '{url}' is a database in memory, which ends with the command "
            "(allowed: a path, sqlite:///PATH)"
        )
    return url


def nvcc() -> Path | None:
    """The compiler the user named."""
    return _path("TUNER_NVCC")


def cutlass_dir() -> Path | None:
    """The CUTLASS checkout the user named."""
    return _path("TUNER_CUTLASS_DIR")


def peers_path() -> Path | None:
    """Folder of modules to measure against."""
    return _path("TUNER_PEERS_PATH")


def sampler() -> str | None:
    """The sampler the user named."""
    return _text("TUNER_SAMPLER")


def optuna_storage() -> str | None:
    """The Optuna storage that takes copies of the studies; None keeps none."""
    return _text("TUNER_OPTUNA_STORAGE")


def read_token() -> str:
    """The bearer token for looking; empty where none is set.

    Raises:
        ConfigError: when a header cannot carry it.
    """
    return _token("TUNER_READ_TOKEN")


def write_token() -> str:
    """The bearer token for submitting and cancelling; empty where none is set.

    Raises:
        ConfigError: when a header cannot carry it.
    """
    return _token("TUNER_WRITE_TOKEN")


def _token(name: str) -> str:
    """A token without the white space around it, as the line end of the file that it came from."""
    token = os.environ.get(name, "").strip()
    if not all("!" <= character <= "~" for character in token):
        raise ConfigError(
            f"{name} holds a character that no HTTP header carries "
            "(allowed: letters, digits and signs of ASCII, without spaces and control characters)"
        )
    return token


def disabled() -> bool:
    """True when the runtime stands aside."""
    return os.environ.get("TUNER_DISABLE", "") not in ("", "0")


def batch_invariant() -> bool:
    """True when results must not depend on the batch (`tuner.deterministic`)."""
    return os.environ.get("TUNER_BATCH_INVARIANT", "") not in ("", "0")


def benchmark() -> bool:
    """True when the runtime times untuned shapes on their first call."""
    return os.environ.get("TUNER_BENCHMARK", "") not in ("", "0")


def answers() -> frozenset[str]:
    """Whose kernels may answer: words of `ANSWERS`.

    Raises:
        ConfigError: when the variable has another word.
    """
    return _answers(os.environ.get("TUNER_ANSWERS", ""))


@cache
def _answers(text: str) -> frozenset[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [word for word in words if word not in ANSWERS]:
        raise ConfigError(
            f"TUNER_ANSWERS={text} has '{unknown[0]}' (allowed: {', '.join(ANSWERS)})"
        )
    return frozenset((*words, *ALWAYS_ANSWER) if words else ANSWERS)


def nvtx() -> bool:
    """True when what runs is marked for Nsight Systems."""
    return os.environ.get("TUNER_NVTX", "") not in ("", "0")


def build_on_miss() -> bool:
    """True when the runtime may start `tuner build` for a kernel that is not there."""
    return os.environ.get("TUNER_BUILD_ON_MISS") != "0"


def vllm_linear() -> bool:
    """True when vLLM's linear layers over e4m3 weights ask for own kernels first."""
    return os.environ.get("TUNER_VLLM_LINEAR", "") not in ("", "0")


def vllm_mla() -> bool:
    """True when vLLM's ``TRITON_MLA`` asks for own decoding of latent attention first."""
    return os.environ.get("TUNER_VLLM_MLA", "") not in ("", "0")


def max_queries(variable: str) -> int | None:
    """Queries of the longest sequence up to which an engine's plug-in takes a call.

    None: any number, but neither caches of e4m3 nor chunks of prompts at D above 64.

    Args:
        variable: the engine's, in `VARIABLES`.

    Raises:
        ConfigError: when the variable is not a whole number of 1 or more.
    """
    text = _text(variable)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{variable}={text} is out of range (allowed: 1 or more)")
    return int(text)
