"""Parser of the output of `ptxas -v`, by kernel of a translation unit."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tuner.measurement import Resources

_FUNCTION = re.compile(r"(?:Compiling entry function '|Function properties for )([\w$.]+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")
#: Warnings about lost performance that are easily missed: "Potential Performance Loss", and (C7506)
#: to (C7519), such as serialised wgmma instructions or an ignored `setmaxnreg`.
_ADVICE = re.compile(r"\(C75\d\d\)|Potential Performance Loss")
_NAMED = re.compile(r"in (?:the )?function '")


def parse_resources(log: str, ids: Iterable[str]) -> dict[str, Resources]:
    """Resources by kernel id, for the ids whose functions appear in the log.

    An id is recognised inside the mangled function name. If an id has several functions, the one
    with the most registers, spills and stack counts.
    """
    resources: dict[str, Resources] = {}
    names = tuple(ids)
    current: str | None = None
    for line in log.splitlines():
        if name := _FUNCTION.search(line):
            current = _owner(name[1], names)
        if current is None:
            continue
        so_far = resources.get(current, Resources(0, 0, 0, 0))
        if frame := _FRAME.search(line):
            stack, stores, loads = map(int, frame.groups())
            resources[current] = Resources(
                so_far.registers,
                max(so_far.spill_store_bytes, stores),
                max(so_far.spill_load_bytes, loads),
                max(so_far.stack_bytes, stack),
                so_far.smem_bytes,
            )
        elif used := _REGISTERS.search(line):
            smem = _SMEM.search(line)
            resources[current] = Resources(
                max(so_far.registers, int(used[1])),
                so_far.spill_store_bytes,
                so_far.spill_load_bytes,
                so_far.stack_bytes,
                max(so_far.smem_bytes, int(smem[1]) if smem else 0),
            )
    return resources


def parse_advice(log: str, ids: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Performance warnings of ptxas by kernel id, the kernel's name shortened to "the kernel".

    A warning that names no kernel goes to all of them: ptxas prints an ignored `setmaxnreg` before
    the first function's name. A warning about another function, as a kernel that was not asked
    for, is left out.
    """
    advice: dict[str, dict[str, None]] = {}
    names = tuple(ids)
    for line in log.splitlines():
        if not _ADVICE.search(line):
            continue
        owner = _owner(line, names)
        if owner is None and _NAMED.search(line):
            continue
        for name in names if owner is None else (owner,):
            text = re.sub(r"'?[\w$]*" + re.escape(name) + r"[\w$]*'?", "the kernel", line.strip())
            advice.setdefault(name, {})[text] = None
    return {name: tuple(lines) for name, lines in advice.items()}


def _owner(text: str, ids: tuple[str, ...]) -> str | None:
    return next((i for i in ids if i in text), None)
