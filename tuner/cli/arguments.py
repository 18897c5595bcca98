"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tuner import settings
from tuner.errors import ConfigError
from tuner.hardware import Gpu
from tuner.measurement import LAUNCHES, Regime, launch_named
from tuner.problem import PROBLEMS, Problem
from tuner.selection.reader import find_gpu

if TYPE_CHECKING:
    from tuner.store import Store

OF_LIST = "operation of the shape (default attention); of a list only its problems"


def add_op(
    parser: argparse.ArgumentParser, about: str = "operation of the shape (default attention)"
) -> None:
    """Add ``--op``, attention without it.

    Args:
        parser: parser of the command.
        about: text of the help.
    """
    parser.set_defaults(op_is_named=False)
    parser.add_argument(
        "--op", choices=sorted(PROBLEMS), default="attention", help=about, action=_Named
    )


class _Named(argparse.Action):
    """Stores the operation, and that the user named it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.op, namespace.op_is_named = values, True


def add_launch(parser: argparse.ArgumentParser, about: str = "how it is launched") -> None:
    """Add ``--regime``: behind an ordinary kernel, behind copies of itself, or eagerly."""
    parser.add_argument("--regime", type=launch_named, choices=LAUNCHES, help=about)


def add_inputs(parser: argparse.ArgumentParser, about: str = "state of the inputs") -> None:
    """Add ``--l2``: the inputs are warm or cold in the L2 cache."""
    parser.add_argument("--l2", choices=("warm", "cold"), help=about)


def add_place(
    parser: argparse.ArgumentParser, about_gpu: str = "as H200; default: this machine's"
) -> None:
    """Add ``--gpu``, ``--regime`` and ``--l2``: what identifies an entry beside its problem."""
    parser.add_argument("--gpu", metavar="NAME", help=about_gpu)
    add_launch(parser)
    add_inputs(parser)


def within(
    least: float, most: float = math.inf, kind: type[int] | type[float] = int
) -> Callable[[str], Any]:
    """Type of an argument that is a number of a range.

    Args:
        least: least allowed number.
        most: largest allowed number.
        kind: kind of the numbers.
    """

    def read(word: str) -> int | float:
        value = kind(word)
        if not least <= value <= most:
            allowed = f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more"
            raise argparse.ArgumentTypeError(f"{word} is out of range (allowed: {allowed})")
        return value

    read.__name__ = kind.__name__
    return read


def add_result(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    about: str = "one JSON object",
) -> None:
    """Add ``--store`` and ``--json``, and the function of the command."""
    add_store(parser)
    parser.add_argument("--json", action="store_true", help=about)
    parser.set_defaults(run=run)


def tell(args: argparse.Namespace, data: object, text: str) -> None:
    """Print a command's result: as one JSON document under ``--json``, else as text."""
    print(json.dumps(data) if args.json else text)


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add ``--store``; without it the command takes `settings.store_url`."""
    parser.add_argument(
        "--store", type=store_named, metavar="URL", help="SQLAlchemy URL or SQLite file"
    )


def url_of(args: argparse.Namespace) -> str:
    """URL of ``--store``, else of the settings."""
    return args.store or settings.store_url()


def utf8_text(word: str) -> str:
    """A word of the command line that is not the name of a file."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{word!a} is not UTF-8 text") from None
    return word


def store_named(word: str) -> str:
    """A store's URL or path of the command line; one that outlives the command."""
    try:
        return settings.durable(utf8_text(word))
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def problem_of(args: argparse.Namespace) -> Problem:
    """The problem of ``--shape``."""
    return PROBLEMS[args.op or "attention"].parse(args.shape)


def gpu_of(args: argparse.Namespace, store: Store | None = None) -> Gpu | None:
    """The GPU of ``--gpu``, of a store's too; None without the option."""
    if not args.gpu:
        return None
    return find_gpu(args.gpu, [entry.gpu for entry in store.entries()] if store else ())


def regimes_of(args: argparse.Namespace, op: str) -> tuple[Regime, ...]:
    """Regimes that match ``--regime`` and ``--l2``, the preferred one first."""
    return Regime.choices(op, args.regime, args.l2)


def usual_inputs(args: argparse.Namespace, op: str) -> tuple[Regime, ...]:
    """`regimes_of` with the operation's usual inputs, unless ``--l2`` names a state."""
    return Regime.choices(op, args.regime, args.l2 or Regime.default(op).l2)
