"""Compilation of a single source to a library in the artifact cache."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.base import resources
from tuner.base.processes import ProcessPool
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.compile.nvcc_flags import code_flags
from tuner.errors import CompileError
from tuner.families.arguments import Arguments

TIMEOUT_S = 300.0
_LOG_LIMIT = 4000
FLAGS = (
    *("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-cudart=static"),
    *("-Xcompiler=-fPIC", "-Xlinker=-s"),
)
"""nvcc's, of a `Source`."""

Recipe = Callable[[Path], tuple[list[str], Mapping[str, str]]]
"""Function that finds its tools and returns the command that writes a library to a path, and the
tools' facts."""


def build(
    artifacts: ArtifactCache,
    key: str,
    source: str,
    recipe: Recipe,
    processes: ProcessPool | None = None,
) -> Artifact:
    """Find a library or compile it. One process of the machine compiles, and the others wait.

    Args:
        artifacts: cache for the library.
        key: key of the artifact.
        source: path under ``templates/``.
        recipe: called only if the library is not cached.
        processes: pool that runs the compiler, so that the caller can kill it.

    Raises:
        CompileError: when a tool is missing, or the compiler rejects the source.
        StoreError: when the cache cannot be written.
    """
    with artifacts.lock(key):
        if artifact := artifacts.find(key):
            return artifact
        with artifacts.workspace() as folder:
            library = folder / "kernel.so"
            command, facts = recipe(library)
            done = (processes or ProcessPool(TIMEOUT_S)).run(command, folder)
            if done.returncode != 0:
                lines = [line for line in done.log.splitlines() if "error" in line]
                reason = (lines or ["no message"])[0].strip()
                raise CompileError(
                    f"{source}: {'stopped: too slow' if done.timed_out else reason}",
                    command=shlex.join(command),
                    log=done.log[:_LOG_LIMIT],
                )
            return artifacts.put(
                key,
                library,
                resources=None,
                compile_cpu_s=done.cpu_s,
                source=(resources.templates() / source).read_text(encoding="utf-8"),
                facts={"template": source, **facts},
            )


@dataclass(frozen=True)
class Source:
    """A kernel without a problem and parameters.

    Its key needs neither a template nor a compiler: the runtime finds it by its source alone.
    """

    name: str
    """File under ``templates/``."""
    arguments: Arguments
    """Declaration of a launch's arguments. The source is not a template, and repeats it."""
    headers: tuple[str, ...] = ("arguments.h", "exported.h", "ptx.h")
    """Headers there that it includes."""

    def key(self) -> str:
        """The artifact's key: a hash of source, headers and flags, nvcc's own ones included."""
        folder = resources.templates()
        names = (self.name, *self.headers)
        digests = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]
        ingredients = [digests, FLAGS, *filter(None, [code_flags()])]
        return hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:32]

    def find(self, artifacts: ArtifactCache) -> Artifact | None:
        """The kernel, where it is built already."""
        return artifacts.find(self.key())

    def build(self, artifacts: ArtifactCache) -> Artifact:
        """Find the kernel or compile it.

        Raises:
            CompileError: when there is no compiler, or it refuses.
            StoreError: when the cache cannot be written.
        """
        name = self.key()

        def recipe(library: Path) -> tuple[list[str], dict[str, str]]:
            from tuner.compile.toolchain import find_toolchain, path_option  # only a build needs it

            tools, folder = find_toolchain(), resources.templates()
            command = [str(tools.nvcc), *FLAGS, f"-ccbin={tools.host_compiler}", f"-I{folder}"]
            command += [*(f"-L{path}" for path in tools.library_dirs), f"-DTUNER_KERNEL={name}"]
            command += [path_option(self.name), str(folder / self.name), "-o", str(library)]
            return command, {"nvcc": tools.nvcc_version}

        return build(artifacts, name, self.name, recipe)


BLOCK_QUANTISER = Source(
    "block_quantiser.cu",
    Arguments(
        tensors=("rows", "elements", "factors"),
        integers=("m", "k", "row_stride", "block_stride", "pdl"),
    ),
)
"""Activations in e4m3 for block-scaled products."""
EXPERT_ROWS = Source(
    "expert_rows.cu",
    Arguments(
        tensors=("experts", "rows", "offsets", "places", "counts", "weights", "out", "factors"),
        integers=(
            *("stage", "row_count", "part_count", "columns"),
            *("row_stride", "block_stride", "width", "pdl"),
        ),
    ),
)
"""The rows of a mixture of experts around its products."""
EXPERT_PRODUCTS = Source(
    "expert_products.cu",
    Arguments(
        tensors=("experts", "rows", "weights", "offsets", "places", "order", "tiles", "out"),
        integers=(
            *("stage", "slot_count", "top_k", "expert_count", "columns", "depth"),
            *("row_stride", "tile_rows", "tile_count", "width", "is_narrow", "pdl"),
        ),
    ),
)
"""Both products of experts that have few rows each."""
PAGED_APPEND = Source(
    "paged_append.cu",
    Arguments(
        tensors=(
            *("query", "key", "value", "cosine", "sine", "table", "used", "starts"),
            *("factor_q", "factor_k", "factor_v", "out", "key_cache", "value_cache"),
        ),
        integers=(
            *("is_bf16", "is_e4m3", "interleaves", "tokens", "batch", "queries"),
            *("heads_q", "heads_kv", "head_dim", "rotary_dim", "positions"),
            *("page_size", "pages", "columns", "table_row", "query_row", "query_head"),
            *("key_row", "key_head", "value_row", "value_head", "out_row", "out_head"),
            *("key_cache_page", "key_cache_slot", "key_cache_head"),
            *("value_cache_page", "value_cache_slot", "value_cache_head", "pdl"),
        ),
    ),
)
"""New keys and values written to a paged cache, with rotary embedding."""
SOURCES = BLOCK_QUANTISER, EXPERT_ROWS, EXPERT_PRODUCTS, PAGED_APPEND
"""All of them."""
