"""Kernels with a change of their text, which show what racecheck sees.

racecheck follows each thread's own arrival at a barrier. It does not follow the order that
`__syncwarp` gives a warp before one of its lanes arrives for all. In `every-lane` each lane arrives
itself: what racecheck still reports there is a race. That is for fused attention, its gradients and
block-scaled products. The others are `every-lane` with a race on purpose, in the gradients: a clean
report means that racecheck does not see accesses of that kind.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tuner.base import resources
from tuner.errors import ConfigError

_FOLDER = "fused_attention_backward/"
_CONSUMERS = (f"{_FOLDER}consumer.cu.j2", f"{_FOLDER}consumer_wide.cu.j2")


@dataclass(frozen=True)
class Change:
    """One replacement in files under ``templates/``."""

    files: tuple[str, ...]
    pattern: str
    """A regular expression that is found at least once in each file."""
    new: str


_EVERY_LANE = (
    Change(
        _CONSUMERS,
        r"__syncwarp\(\);\n    if \(lane == 0\) Empty::arrive\(empty\);",
        "compiler_fence();\n    Empty::arrive(empty);",
    ),
    Change(
        ("fused_attention/consumer.cu.j2",),
        r"__syncwarp\(\);\n      if \(tid % 32 == 0\) Empty::arrive\(empty\);",
        "compiler_fence();\n      Empty::arrive(empty);",
    ),
    Change(  # of the consumers
        ("fused_attention/scheduler.cu.j2",),
        r"__syncwarp\(\);\n        compiler_fence\(\);\n        if \(threadIdx\.x % 32 == 0\) ",
        "compiler_fence();\n        ",
    ),
    Change(  # of the warps that copy pages
        ("fused_attention/scheduler.cu.j2",),
        r"        __syncwarp\(\);\n        if \(threadIdx\.x(?: % 32)? == 0\) (Empty::arrive\()",
        r"        \g<1>",
    ),
    Change(
        ("fused_attention.cu.j2",),
        r'"1 \+ kTurners" if turns else copy_warps if copy_warps > 1 else "kProducerReturns"',
        '"32 * (1 + kTurners)" if turns else 32 * copy_warps if copy_warps > 1 '
        'else "32 * kProducerReturns" if is_paged else "kProducerReturns"',
    ),
    Change(
        ("block_scaled_gemm.cu.j2",),
        r"  __syncwarp\(\);\n  const uint32_t lane = threadIdx\.x % kWarp;\n"
        r"  if constexpr \(kMulticast > 1\) \{\n    if \(lane < kMulticast\) [^\n]*\n"
        r"  \} else \{\n    if \(lane == 0\) arrive\(empty\);\n",
        "  const uint32_t own = block_rank();\n"
        "  if constexpr (kMulticast > 1) {\n"
        "    for (uint32_t block = 0; block < kMulticast; ++block) {\n"
        "      if (block == own) arrive(empty);\n"
        "      else arrive_in_block(in_block(empty, block));\n"
        "    }\n"
        "  } else {\n    arrive(empty);\n",
    ),
    Change(
        ("block_scaled_gemm.cu.j2",),
        r"kEmptyArrivals = kGroups \* \(kWarpGroup / kWarp\) \* kMulticast",
        "kEmptyArrivals = kGroups * kWarpGroup * kMulticast",
    ),
    Change(
        ("fused_attention.cu.j2", "fused_attention_backward.cu.j2"),
        r"(Empty::init\(&s\.\w+(?:\[\w+\])*, )4\b",
        r"\g<1>128",
    ),
)
_RELEASE_Q = r"(      release\(&s\.q_empty\[stage\]\);\n)    \}\n"
_WAIT_DS = r"    if constexpr \(kWaitsForDs\) Empty::wait\(&s\.ds_empty[^\n]*\n"
_STORE_SUMS = (
    r"(      Empty::wait\(&s\.sums_empty\[group\], of % 2 \^ 1\);\n)"
    r"((?:      [^\n]*\n)*?      CUTE_UNROLL\n(?:      [^\n]*\n)*?      \}\n)"
)
VARIANTS: Mapping[str, Sequence[Change]] = {
    "every-lane": _EVERY_LANE,
    # A statistic of a stage is read once more behind the arrival that lets the next copy in.
    "late-read": (
        *_EVERY_LANE,
        Change(
            _CONSUMERS[:1],
            _RELEASE_Q,
            r"\g<1>"
            "      tDk(0) += *static_cast<float const volatile*>(&s.lse_log2[stage][lane]);\n"
            "    }\n",
        ),
    ),
    # dS is written while the product before may still read it.
    "early-ds": (*_EVERY_LANE, Change(_CONSUMERS[:1], _WAIT_DS, "")),
    # dQ is written while the copy before may still read it.
    "early-sums": (*_EVERY_LANE, Change(_CONSUMERS[:1], _STORE_SUMS, r"\g<2>\g<1>")),
}


def change(folder: Path, changes: Sequence[Change]) -> None:
    """Change the templates in `folder`.

    Raises:
        ConfigError: when a file does not have the text.
    """
    for each in changes:
        for name in each.files:
            path = folder / name
            text, count = re.subn(each.pattern, each.new, path.read_text())
            if not count:
                raise ConfigError(f"{name} has no text like {each.pattern!r}")
            path.write_text(text)


@contextmanager
def rendered_as(variant: str) -> Iterator[None]:
    """Kernels are rendered from changed templates; from the project's where `variant` is empty.

    Raises:
        ConfigError: when a template does not have the text.
    """
    if not variant:
        yield
        return
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / "templates"
        shutil.copytree(resources.templates(), folder)
        change(folder, VARIANTS[variant])
        with patch.object(resources, "templates", lambda: folder):
            yield
