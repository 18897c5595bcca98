"""``tuner quickstart``: first steps with one shape, from a check of the machine to a call in
PyTorch.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
from typing import Any

from tuner.base.install import extra_command
from tuner.base.processes import python_command, python_environment
from tuner.errors import TunerError
from tuner.hardware import DEFAULT_GPU

SHAPE = "S=1024,D=64"

DESCRIPTION = f"""Runs the first steps with attention of {SHAPE} and prints each command. They are
`tuner doctor`, `tuner lookup`, `tuner build`, one call in PyTorch, and the counters of the runtime.
It stops where this machine lacks something, and says in one line what the rest needs."""

CALL = """\
import torch
import tuner

query, key, value = (
    torch.randn(1, 16, 1024, 64, dtype=torch.float16, device="cuda") for _ in range(3)
)
out = tuner.attention(query, key, value)
expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
print("largest difference from PyTorch's:", (out - expected).abs().max().item())
print(tuner.stats())"""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "quickstart",
        help="run the first steps, as far as this machine can",
        description=DESCRIPTION,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the steps that this machine can. Returns 1 if one of them failed."""
    from tuner.cli.doctor import MISSING, OK, conclude, examine, findings_text
    from tuner.measure.device import detect

    print("$ tuner doctor")
    findings = examine()
    missing = {f.name: f for f in findings if f.state == MISSING}
    print(findings_text(findings))
    print(conclude(set(missing)))
    gpu = (detect() or DEFAULT_GPU).name if "cuda-python" not in missing else DEFAULT_GPU.name
    place = f"--shape {SHAPE} --gpu {shlex.quote(gpu)}"
    lacks = [f"{f.name} ({f.found})" for f in missing.values()]
    built = _command(f"lookup {place} --allow-other-gpu") == 0
    compiling = {"nvcc", "host compiler", "CUTLASS", "compiling", "store", "artifact cache"}
    if not compiling & set(missing):
        built = _command(f"build {place}") == 0 and built
    print(f"\n$ python\n{CALL}\n", flush=True)
    if not any(f.name == "torch" and f.state == OK for f in findings):
        lacks.append(f"PyTorch with CUDA ({extra_command('torch')})")
    if lacks:
        print(f"The call is left out, for what is missing here: {'; '.join(lacks)}.")
        return 0 if built else 1
    finished = subprocess.run(python_command("-c", CALL), env=python_environment(), check=False)
    return 0 if built and finished.returncode == 0 else 1


def _command(line: str) -> int:
    """Print a command and run it. Returns its exit code, or 1 if it raised an error."""
    from tuner.cli import parser

    print(f"\n$ tuner {line}", flush=True)
    args = parser().parse_args(shlex.split(line))
    try:
        return int(args.run(args))
    except TunerError as exc:
        print(f"tuner: {exc}")
        return 1
