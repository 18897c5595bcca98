"""``tuner develop fit``: fit what ships to measurements: portfolios, and constants of models."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tuner.base.output import check_place
from tuner.cli.arguments import add_store, gpu_of, within
from tuner.errors import ConfigError
from tuner.families.by_operation import DOMAINS
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Regime
from tuner.search.fits import FITS, fit
from tuner.store import open_store

PORTFOLIO = "portfolio"
DESCRIPTION = """Without NAME, makes a portfolio: few kernels for each domain, with a time model for
each, which serve any shape of the operation. A domain is head dimension, mask and phase of
attention, or rows and epilogue of a product. The input is what the store, the shipped recordings
and the shipped decisions hold. Prints the regret at models that were left out. With --only, FILE
keeps its other domains.

With NAME, fits constants that ship to files, and prints those that change beside what ships, with
the errors of both. Only --gpu, --write and --only count then; --only names families of the cost
models."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "fit", help="make a portfolio for untuned shapes, or fit constants", description=DESCRIPTION
    )
    names, texts = (PORTFOLIO, *FITS), "; ".join(f"{name}: {text}" for name, text in FITS.items())
    parser.add_argument(
        "name", nargs="?", default=PORTFOLIO, choices=names, metavar="NAME", help=texts
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="measured files")
    parser.add_argument(
        "--write", action="store_true", help="store what NAME fits, or print a module's constants"
    )
    parser.add_argument(
        "--op", choices=sorted(DOMAINS), default="attention", help="operation (default attention)"
    )
    parser.add_argument("--gpu", metavar="NAME", help="as H200 (default)")
    add_store(parser)
    parser.add_argument(
        "--only",
        metavar="TEXT,...",
        help="only domains whose name holds each of these, as in D=256,few queries; the others "
        "stay as FILE has them",
    )
    parser.add_argument(
        "--kernels",
        type=within(1),
        metavar="N",
        help="most compiled kernels of a domain (default 4 to 8)",
    )
    same = parser.add_mutually_exclusive_group()
    same.add_argument(
        "--shipped-kernels",
        action="store_true",
        help="only kernels of the shipped portfolios, which need no new proof",
    )
    same.add_argument(
        "--same-kernels",
        action="store_true",
        help="only kernels that the GPU's own shipped portfolio has in the domain",
    )
    parser.add_argument(
        "--join",
        action="store_true",
        help="take only kernels that pad heads or divide K in a cluster. They join those that "
        "serve the domains of cold inputs now, whatever GPU these were measured on",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write the portfolio to"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fit a portfolio or constants, and write them. Returns 0.

    Raises:
        ConfigError: when the files do not suffice.
        StoreError: when a file cannot be written.
    """
    only = tuple(args.only.split(",")) if args.only else ()
    if args.name == PORTFOLIO:
        if args.files or args.write:
            raise ConfigError(f"FILE and --write need a NAME (allowed: {', '.join(FITS)})")
        return _portfolio(args, only)
    try:
        result = fit(args.name, args.files, gpu_of(args) or DEFAULT_GPU, only)
    except (LookupError, TypeError, AttributeError) as exc:
        source = FITS[args.name].rpartition(", from ")[2]
        raise ConfigError(f"the rows are not of {source}: {exc!r}") from exc
    print(result.text())
    if args.write:
        print(result.write())
    return 0


def _portfolio(args: argparse.Namespace, only: Collection[str]) -> int:
    """Fit a portfolio and write it. Returns 0.

    Raises:
        ConfigError: when there is too little to make one from, or FILE is of another operation or
            GPU.
        StoreError: when the store cannot be read, or the file cannot be written.
    """
    from tuner.search import portfolio
    from tuner.selection.portfolio import Portfolio, serving, shipped

    check_place(args.output)
    if args.only and args.output is None:
        raise ConfigError("--only is for --output: FILE has the other domains")
    before = Portfolio.read(args.output) if args.only else None
    with open_store(args.store) as store:
        gpu = gpu_of(args, store) or DEFAULT_GPU
        measured = {
            regime: portfolio.measurements(args.op, gpu, regime, store)
            for regime in Regime.choices(args.op)
        }
    if args.shipped_kernels or args.same_kernels:
        of = gpu if args.same_kernels else None
        measured = {regime: portfolio.of_shipped(rows, of) for regime, rows in measured.items()}
    result = portfolio.make(args.op, measured, gpu, only, args.kernels)
    if args.join:
        result = result.joining(next(one for one in serving(shipped(), gpu) if one.op == args.op))
    if args.output is not None:
        (result if before is None else before.updated(result)).write(args.output)
    if args.json:
        print(json.dumps(result.to_json()))
        return 0
    for models in result.domains.values():
        own = sum(not candidate.is_vendor for candidate in models.candidates)
        print(f"{models.domain.label()} ({models.regime}): {own} kernels; {models.regret.text()}")
    return 0
