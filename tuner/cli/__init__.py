"""The command line. Every command is a module here; heavy libraries load when one runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import tuner
from tuner.errors import ConfigError, TunerError
from tuner.settings import VARIABLES

COMMANDS = (
    "sweep",
    "bench",
    "record",
    "survey",
    "report",
    "explain",
    "profile",
    "compare",
    "shapes",
    "fit",
    "plan",
    "entries",
    "build",
    "revalidate",
    "bundle",
    "artifacts",
    "doctor",
    "legality",
    "store",
    "jobs",
    "worker",
    "serve",
    "sync",
)
"""Modules of this package with a `register`."""

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

EXIT_CODES = """exit codes:
  0    done
  1    it could not be done: no kernel passed, nothing found, compiler missing, disk full,
       a store that cannot be opened or is damaged
  2    wrong input: the message names what was wrong and what is allowed
  130  interrupted; what was found so far is stored"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and the message, without the usage."""
        self.exit(WRONG_INPUT, f"{self.prog}: {message}\n")


def parser() -> Parser:
    """The parser of all commands."""
    variables = "\n".join(f"  {name:<19} {text}" for name, text in VARIABLES.items())
    root = Parser(
        prog="tuner",
        description="Finds, keeps and serves the fastest CUTLASS kernel of a problem on Hopper.",
        epilog=f"{EXIT_CODES}\n\nenvironment variables:\n{variables}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    root.add_argument("--version", action="version", version=f"cutlass-tuner {tuner.__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"{__name__}.{name}").register(commands)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if sys.stdout is None:  # closed: a database would be opened in its place, and printed into
        return _fail("standard output is closed: leave it open, or send it to a file", FAILED)
    try:
        args = parser().parse_args(argv)
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except ConfigError as exc:
        return _fail(str(exc), WRONG_INPUT)
    except TunerError as exc:
        return _fail(str(exc), FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read standard output has gone: nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as exc:
        return _fail(str(exc), FAILED)


def _fail(message: str, code: int) -> int:
    print(f"tuner: {message}", file=sys.stderr)
    return code
