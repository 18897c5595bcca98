"""Kernel families, one in each of `MODULES`. `docs/pages/family.md` adds one."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

from tuner.errors import ConfigError
from tuner.families.base import Family

_LOG = logging.getLogger("tuner.families")
MODULES = (
    "block_scaled_gemm",
    "block_scaled_grouped_gemm",
    "cluster_gemm",
    "fused_attention",
    "fused_attention_backward",
    "gemm",
    "gemm_swiglu",
    "gemv",
    "grouped_gemm",
    "mla_decode",
    "softmax",
    "three_kernel_attention",
    "triton_attention",
    "two_kernel_attention",
    "peers.blas",
    "peers.cublaslt_search",
    "peers.cudnn_plans",
    "peers.flex",
    "peers.grouped_gemm",
    "peers.sdpa",
    "peers.sdpa_backward",
    "peers.softmax",
    "peers.swiglu",
)
"""Modules that define families. A family's own one has its name; what else lies in its folder is
imported where it is used."""
RETIRED: Mapping[str, str] = {
    "cutlass_fmha": "CUTLASS's Hopper FMHA example, slower than fused_attention",
}
"""Families of earlier versions. Stores, documents and recordings that name them are read, and no
kernel of theirs is launched."""


@cache
def families() -> dict[str, Family]:
    """All families by name, own ones and vendors', in alphabetical order."""
    members: dict[str, Family] = {}
    for module in MODULES:
        members |= _members(module)
    return dict(sorted(members.items()))


@cache
def _members(module: str) -> dict[str, Family]:
    """The families of one module: the same objects at every call."""
    return _defined_in(importlib.import_module(f"{__name__}.{module}"))


def families_in(path: Path) -> dict[str, Family]:
    """Families that a file outside the package defines, by name; not registered by this.

    Raises:
        ConfigError: when it cannot be imported.
    """
    spec = importlib.util.spec_from_file_location(f"tuner_families_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"'{path}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError, SyntaxError, TypeError) as exc:
        raise ConfigError(f"'{path}' cannot be imported: {exc}") from exc
    return _defined_in(module)


def _defined_in(module: ModuleType) -> dict[str, Family]:
    return {
        value.name: value()
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Family)
        and value.__module__ == module.__name__
        and not value.__abstractmethods__
    }


def family(name: str) -> Family:
    """One family by name, without loading the others where `find` does.

    Raises:
        ConfigError: when there is none of that name; says which there are.
    """
    if name in RETIRED:
        raise ConfigError(
            f"family '{name}' was removed ({RETIRED[name]}): no kernels of it can be built"
        )
    member = find(name)
    if member is None:
        raise ConfigError(f"family '{name}' is not known (allowed: {', '.join(families())})")
    return member


@cache
def find(name: str) -> Family | None:
    """One family by name, or None. The others are not imported where its module has the same name,
    or that of a vendor without ``vendor_``.
    """
    for module in (name, f"peers.{name.removeprefix('vendor_')}"):
        if module in MODULES and (member := _members(module).get(name)):
            return member
    return families().get(name)


@cache
def note_retired(name: str) -> None:
    """Log once that a family of `RETIRED` is among what is read."""
    _LOG.warning(
        "family '%s' was removed (%s): its measurements are kept, its kernels are not launched",
        name,
        RETIRED[name],
    )


def families_of(op: str) -> dict[str, Family]:
    """The families that serve an operation."""
    return {name: member for name, member in families().items() if member.op == op}
