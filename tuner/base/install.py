"""Commands that install what is missing, for the Python that runs."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys

from tuner.base import resources

DISTRIBUTION = "cutlass-tuner"


def extra_command(name: str) -> str:
    """The command that adds an extra of this package to this installation.

    A checkout is named by its path, since no index has it. An installed wheel is named by its
    distribution, which pip then finds in the environment.

    Args:
        name: key of ``[project.optional-dependencies]``, such as ``report``.
    """
    checkout = resources.checkout()
    if checkout is None:
        return install_command(f"{DISTRIBUTION}[{name}]")
    return _command("-e", f"{checkout}[{name}]")


def install_command(*requirements: str) -> str:
    """The command that installs packages of an index, by default into this environment.

    Args:
        requirements: as pip reads them, as ``nvidia-cutlass==4.2.0.0``, and its options.
    """
    return _command(*requirements)


def version_of(distribution: str) -> str:
    """Version of an installed distribution, as `importlib.metadata.version`, which also parses the
    whole description: 3 ms for torch's.

    Raises:
        PackageNotFoundError: when it is not installed.
    """
    installed = importlib.metadata.distribution(distribution)
    for line in (installed.read_text("METADATA") or "").splitlines():
        if line.startswith("Version:"):
            return line.partition(":")[2].strip()
    return installed.version


def _command(*arguments: str) -> str:
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *arguments])
