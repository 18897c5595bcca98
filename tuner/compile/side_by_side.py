"""Both halves of a translation unit at the same time.

nvcc runs cudafe++ for the host's half first, and cicc and ptxas for the device's half after it.
Neither reads the other's output, so a unit takes a third less time where a core is free. The
commands are those that ``nvcc --dryrun`` prints, so the machine code is the same.

A unit with a host half of its own has two commands (`together`). The host half is compiled to
assembler meanwhile, which includes the device's code when it is assembled.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_VARIABLE = re.compile(r"(PATH|LD_LIBRARY_PATH|CICC_PATH|NVVMIR_LIBRARY_DIR)=(.*)")
_MODULE_ID = re.compile(r'--module_id_file_name "([^"]+)"')


def script(command: Sequence[str], dry_run: str) -> str | None:
    """Shell script that does what an nvcc command does; None if its steps are other ones.

    Both halves name the unit's internal symbols by a hash. cudafe++ writes it into a file for cicc;
    here each writes its own. If they differ, the script runs the command itself.

    Args:
        command: nvcc command that compiles and links one source.
        dry_run: output of the command with ``--dryrun``.
    """
    lines = [line[3:].strip() for line in dry_run.splitlines() if line.startswith("#$ ")]
    variables = [match for line in lines if (match := _VARIABLE.fullmatch(line))]
    # Temporary files go with the unit's folder, without `rm`.
    steps = [line for line in lines if not re.match(r"\w+=|rm ", line)]
    tools = [_tool(step) for step in steps]
    if tools[:6] != ["g++", "cudafe++", "g++", "cicc", "ptxas", "fatbinary"]:
        return None
    host, device, linking = steps[:2], steps[2:6], steps[6:]
    written, read = _MODULE_ID.search(host[1]), _MODULE_ID.search(device[1])
    if written is None or read is None or written[1] != read[1]:
        return None
    own = f"{read[1]}.device"
    renamed = f'--gen_module_id_file --module_id_file_name "{own}"'
    device[1] = device[1].replace(read[0], renamed)
    return "\n".join(
        [
            *(f"export {variable[1]}={shlex.quote(variable[2])}" for variable in variables),
            f"{{ {' && '.join(host)}; }} &",
            f"{' && '.join(device)} || exit",
            "wait $! || exit",
            f'[ "$(cat {shlex.quote(read[1])})" = "$(cat {shlex.quote(own)})" ] ||',
            f"exec {shlex.join(command)}",
            " && ".join(linking),
        ]
    )


def together(
    host: Sequence[Sequence[str]], device: Sequence[Sequence[str]], rest: Sequence[Sequence[str]]
) -> str:
    """Shell script that runs the commands of two halves at once, and the rest after both."""

    def steps(commands: Sequence[Sequence[str]]) -> str:
        return " && ".join(map(shlex.join, commands))

    return f"{{ {steps(host)}; }} &\n{steps(device)} || exit\nwait $! || exit\n{steps(rest)}"


def _tool(step: str) -> str:
    """Name of a command's program; every host compiler is called ``g++``."""
    name = shlex.split(step)[0].rpartition("/")[2]
    return "g++" if re.search(r"\s-(E|c)\s+-x c\+\+", step) else name
