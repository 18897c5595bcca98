"""Command line. Each command is a module of this package, and imports heavy libraries only when it
runs.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO, cast

import tuner
from tuner.base.printable import PrintableStream
from tuner.base.processes import RaisesInterrupted, exit_code
from tuner.cli import groups, start
from tuner.cli.arguments import utf8_text
from tuner.cli.help import groups_text
from tuner.errors import ConfigError, TunerError
from tuner.settings import VARIABLES

COMMANDS = (
    "quickstart",
    "help",
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
    "prove",
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
"""Modules of this package that have a function `register`."""

DONE, FAILED, WRONG_INPUT = 0, 1, 2

EXIT_CODES = """exit codes:
  0    done
  1    it could not be done: no kernel passed, nothing found, compiler missing, disk full,
       a store that cannot be opened or is damaged
  2    wrong input: the message names what was wrong and what is allowed
  129, 130, 143
       ended by SIGHUP, SIGINT (Ctrl-C) or SIGTERM; what was found so far is stored"""


class WrongUsage(SystemExit):
    """End of a command whose arguments cannot be parsed, after its message."""

    def __init__(self, message: str) -> None:
        super().__init__(WRONG_INPUT)
        self.message = message


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line.

    Arguments that are not UTF-8 are accepted only as file names (``type=Path``).
    """

    _is_intermixed = False
    """True while `parse_known_intermixed_args` calls back."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.register("type", None, utf8_text)

    def add_subparsers(self, **options: Any) -> Any:
        """Add commands, whose parsers check their own arguments."""
        action = super().add_subparsers(**options)
        action.type = str
        return action

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Also where options stand between positional arguments of any number."""
        positional = self._get_positional_actions()
        counts = {action.nargs for action in positional}
        is_open = counts & {"?", "*", "+"} and not counts & {argparse.PARSER, argparse.REMAINDER}
        grouped = [a for group in self._mutually_exclusive_groups for a in group._group_actions]
        if self._is_intermixed or not is_open or any(a in grouped for a in positional):
            return super().parse_known_args(args, namespace)
        self._is_intermixed = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_intermixed = False

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """An argument's value; an empty one is a shell's variable that is not set."""
        is_own = action.nargs not in (argparse.PARSER, argparse.REMAINDER)
        if not arg_string and action.default != "" and is_own:
            raise argparse.ArgumentError(action, "its value is empty (allowed: a text, or none)")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and the message, without the usage. For a wrong choice the message
        suggests the nearest allowed one, for a missing command where they are listed.
        """
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            allowed = [word.strip(" '") for word in choice[2].split(",")]
            former = groups.hidden() if self.prog == "tuner" else frozenset()
            shown = ", ".join(f"'{word}'" for word in allowed if word not in former)
            message = message.replace(choice[2], shown)
            for nearest in difflib.get_close_matches(choice[1], allowed, 1):
                message += f"; did you mean {nearest}?"
        if re.search(r"arguments are required: (COMMAND|ACTION)$", message):
            message += f" (`{self.prog} --help` lists them)"
        self._print_message(f"{self.prog}: {message}\n", sys.stderr)
        raise WrongUsage(message)


class _Notes(io.FileIO):
    """Standard error that drops output it cannot write, instead of raising."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _secure_streams() -> None:
    """Open the null device in place of a closed standard input or error, and make writes to
    standard error never fail.

    Otherwise a database opened later would take the closed stream's descriptor, and be written
    into.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    encoding = sys.stderr.encoding if sys.stderr is not None else "utf-8"
    notes = io.BufferedWriter(_Notes(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(notes, encoding, "backslashreplace", line_buffering=True)


def parser() -> Parser:
    """Parser of all commands."""
    width = max(map(len, VARIABLES))
    variables = "\n".join(f"  {name:<{width}} {text}" for name, text in VARIABLES.items())
    about = "Finds, keeps and serves the fastest CUTLASS kernel of a problem on Hopper."
    root = Parser(
        prog="tuner",
        usage="tuner [-h] [--version] COMMAND ...",
        epilog=f"{EXIT_CODES}\n\nenvironment variables:\n{variables}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"cutlass-tuner {tuner.__version__}")
    root.set_defaults(run=start.run)
    commands = root.add_subparsers(
        dest="command", metavar="COMMAND", prog="tuner", help=argparse.SUPPRESS
    )
    for name in COMMANDS:
        importlib.import_module(f"{__name__}.{name}").register(commands)
    groups.gather(commands)
    # Argparse's own list of commands is suppressed; the description lists them in groups.
    shown = {action.dest: action.help or "" for action in commands._get_subactions()}
    commands.choices["help"].set_defaults(root=root)
    root.description = f"{about}\n\n{groups_text(shown)}"
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    Args:
        argv: arguments; None: the process's own, which must then exit with the returned code.
    """
    with RaisesInterrupted() as signals:
        code = _run(argv)
        if argv is None and code not in (DONE, FAILED, WRONG_INPUT):
            signals.ignore_from_now_on()
        return code


def _run(argv: Sequence[str] | None) -> int:
    if argv is None:  # arguments of the process
        _secure_streams()

    words = sys.argv[1:] if argv is None else list(argv)
    wants_json = "--json" in words and words[0] != "bench"  # whose --json names a file
    outputs: list[PrintableStream] = []

    def run() -> int:
        args = parser().parse_args(argv)
        with _printing() as output:
            outputs.append(output)
            return int(args.run(args))

    def report(message: str) -> None:
        if wants_json and not any(output.is_used for output in outputs):
            print(json.dumps({"error": message}), flush=True)

    return ended(run, "tuner", report)


def ended(
    run: Callable[[], int], name: str, report: Callable[[str], None] = lambda message: None
) -> int:
    """Exit code of a command. Its errors and signals are one line on standard error; a reader of
    standard output that has gone is none.

    Args:
        run: runs the command and returns its exit code.
        name: name that begins the line.
        report: called with the message of a failure.
    """
    usage: WrongUsage | None = None
    try:
        code, message = _end_of(run, name)
    except WrongUsage as exc:
        usage, code, message = exc, WRONG_INPUT, exc.message
    if message:
        with contextlib.suppress(OSError):
            report(message)
    if usage is not None:
        raise usage
    return code


def _end_of(run: Callable[[], int], name: str) -> tuple[int, str]:
    """Exit code of a command, and the message of its failure."""
    if sys.stdout is None:  # closed: a database would get its descriptor and be printed into
        return _fail(name, "standard output is closed: leave it open, or send it to a file", FAILED)
    try:
        try:
            code = run()
        except SystemExit:  # the parser printed help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code, "" if code == DONE else "standard error says why"
    except ConfigError as exc:
        return _fail(name, str(exc), WRONG_INPUT)
    except TunerError as exc:
        return _fail(name, str(exc), FAILED)
    except KeyboardInterrupt as exc:
        return _fail(name, "interrupted", exit_code(exc))
    except BrokenPipeError:  # further output goes to the null device
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED, ""
    except OSError as exc:
        return _fail(name, str(exc), FAILED)


@contextlib.contextmanager
def _printing() -> Iterator[PrintableStream]:
    """Strip terminal control sequences from all output: stored names may come from anywhere.

    Gives standard output.
    """
    out = PrintableStream(sys.stdout)
    err = None if sys.stderr is None else cast("TextIO", PrintableStream(sys.stderr))
    with contextlib.redirect_stdout(cast("TextIO", out)), contextlib.redirect_stderr(err):
        yield out


def _fail(name: str, message: str, code: int) -> tuple[int, str]:
    with _printing():
        print(f"{name}: {message}", file=sys.stderr)
    return code, message
