"""Faults planted in the rules that keep answers right, and the tests that catch them.

``draw`` draws changes of single lines by a seed, as many in each area, and writes them to a file.
``run`` plants each one in a copy of the sources and runs its area's tests until one fails. Results
are written after each fault, and the same command goes on where it stopped. A fault is named by its
function and line, so it is found again after its function moved to another module.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tuner.base.processes import python_command

TOP = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".json")

AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gate": (
        ("tuner/measure/gate/*.py", "tuner/measure/tolerance.py"),
        ("gate", "gate_masks", "gate_memory", "tolerance", "gradient_limits", "log_sum_exp"),
    ),
    "legality": (
        ("tuner/families/fused_attention/legality.py", "tuner/families/gemm/legality.py"),
        ("fused_attention_legality", "fused_attention", "gemm", "gemm_space", "hostile_configs"),
    ),
    "guards": (
        tuple(f"tuner/runtime/call/{name}.py" for name in ("guards", "refusal", "serving")),
        ("runtime", "runtime_refusal", "runtime_alignment", "runtime_tensors", "runtime_serving"),
    ),
    "leases": (
        ("tuner/store/sql_jobs.py", "tuner/store/job_statements.py", "tuner/store/jobs.py"),
        ("jobs", "controller"),
    ),
    "keys": (
        (
            "tuner/compile/compiler.py:key,_ingredients,flags",
            "tuner/compile/toolchain.py:headers_digest,include_dirs",
            "tuner/compile/render.py",
            "tuner/compile/device_code.py",
            "tuner/base/resources.py",
        ),
        ("device_code", "render", "kernel_list", "shipped_proofs", "toolchain", "compiler"),
    ),
    "authentication": (
        ("tuner/service/guard.py", "tuner/service/tokens.py", "tuner/service/protocol.py"),
        ("service_guard", "service_login", "service_connections", "service"),
    ),
    "provenance": (
        (
            "tuner/selection/kernel_list.py",
            "tuner/selection/kernels.py",
            "tuner/tuning/proof.py",
            "tuner/base/ownership.py",
        ),
        tuple(
            "kernel_list hostile_kernel_lists artifacts proof proofs_kept build_portfolio".split()
        ),
    ),
}
"""Files of each area, with the functions of some, and the unit tests that its faults run with."""
LIMIT_S = 600.0
CAUGHT, SURVIVED, LATE, GONE = "caught", "survived", "out of time", "gone"

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Fault:
    """A change of one line."""

    area: str
    file: str
    """Path in the repository, at the time of the draw."""
    function: str
    """Qualified name; the line appears once in it."""
    before: str
    after: str

    @property
    def id(self) -> str:
        """Digest of the change, without the file."""
        text = "\0".join((self.area, self.function, self.before, self.after))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def changed(node: ast.AST) -> ast.AST | None:
    """A node with a fault; None where this script has none for it."""
    other = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[operator]) if type(operator) in _OPPOSITE:
            other.ops = [_OPPOSITE[type(operator)]()]
        case ast.BoolOp():
            other.op = ast.Or() if isinstance(other.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return other.operand
        case ast.Constant(value=bool(value)):
            other.value = not value
        case ast.Constant(value=int(value)):
            other.value = value + 1
        case ast.Raise():
            return ast.Pass()
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            other.func = ast.Name({"min": "max", "max": "min"}[name])
        case _:
            return None
    return other


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods with their qualified names; inner functions belong to the outer one."""
    waiting: list[tuple[str, ast.stmt]] = [("", statement) for statement in tree.body]
    while waiting:
        prefix, statement = waiting.pop()
        if isinstance(statement, ast.FunctionDef):
            yield f"{prefix}{statement.name}", statement
        elif isinstance(statement, ast.ClassDef):
            waiting += [(f"{prefix}{statement.name}.", inner) for inner in statement.body]


def candidates(area: str, file: str, text: str) -> Iterator[Fault]:
    """All faults of a file that change one line, which its function has once."""
    lines = text.splitlines()
    for name, function in functions(ast.parse(text)):
        span = [line.strip() for line in lines[function.lineno - 1 : function.end_lineno]]
        body = [node for statement in function.body for node in ast.walk(statement)]
        for node in body:
            other = changed(node)
            if other is None or not isinstance(node, ast.expr | ast.stmt):
                continue
            line = lines[node.lineno - 1]
            if node.end_lineno != node.lineno or span.count(line.strip()) != 1:
                continue
            data = line.encode()
            new = ast.unparse(ast.fix_missing_locations(other))
            if isinstance(node, ast.Compare | ast.BoolOp):
                new = f"({new})"
            after = data[: node.col_offset] + new.encode() + data[node.end_col_offset :]
            yield Fault(area, file, name, line.strip(), after.decode().strip())


def draw(seed: int, count: int) -> list[Fault]:
    """Faults by a seed, as many in each area; of a line there is one at most."""
    drawn: list[Fault] = []
    for number, (area, (patterns, _)) in enumerate(AREAS.items()):
        every: list[Fault] = []
        for pattern, _, names in (pattern.partition(":") for pattern in patterns):
            wanted = set(filter(None, names.split(",")))
            for path in sorted(TOP.glob(pattern)):
                faults = candidates(area, path.relative_to(TOP).as_posix(), path.read_text())
                every += [f for f in faults if not wanted or f.function.split(".")[-1] in wanted]
        random.Random(f"{seed} {area}").shuffle(every)
        by_line = {(fault.file, fault.function, fault.before): fault for fault in every}
        size = count // len(AREAS) + (number < count % len(AREAS))
        drawn += list(by_line.values())[:size]
    return drawn


def planted(fault: Fault, root: Path) -> tuple[Path, str] | None:
    """The file that has a fault's line in its function, and its text with the fault."""
    places = [root / fault.file, *sorted((root / "tuner").rglob("*.py"))]
    for path in (path for path in places if path.is_file()):
        text = path.read_text()
        if fault.before not in text:
            continue
        lines = text.splitlines(keepends=True)
        for name, function in functions(ast.parse(text)):
            span = range(function.lineno - 1, function.end_lineno or 0)
            hits = [at for at in span if lines[at].strip() == fault.before]
            if name == fault.function and len(hits) == 1:
                lines[hits[0]] = lines[hits[0]].replace(fault.before, fault.after)
                return path, "".join(lines)
    return None


class Copy:
    """A copy of the repository's files, whose tests are run.

    Args:
        root: folder of the copy.
        limit_s: seconds that the tests of one fault may take.
    """

    def __init__(self, root: Path, limit_s: float) -> None:
        self.root, self._limit_s = root, limit_s
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=TOP, check=True, capture_output=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (TOP / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(TOP / name, root / name)

    def test(self, area: str) -> tuple[str, str, float]:
        """Run an area's tests until one fails: result, the failed test, and seconds."""
        named = [f"tests/unit/test_{name}.py" for name in AREAS[area][1]]
        files = [file for file in named if (self.root / file).is_file()]
        command = python_command("-m", "pytest", "-x", "-q", "-pno:cacheprovider", *files)
        environment = {**os.environ, "PYTHONPATH": str(self.root)}
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return LATE, "", time.monotonic() - started
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        name = failed[1] if failed else output[-300:]
        spent = time.monotonic() - started
        return (CAUGHT, name, spent) if process.returncode else (SURVIVED, "", spent)

    def with_fault(self, fault: Fault) -> tuple[str, str, float]:
        """As `test`, with a fault, which is taken out again."""
        place = planted(fault, self.root)
        if place is None:
            return GONE, "", 0.0
        path, text = place
        before = path.read_text()
        try:
            self._write(path, text)
            return self.test(fault.area)
        finally:
            self._write(path, before)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Write a source and remove its bytecode, which may look as new as the source."""
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


def run(faults: list[Fault], results_file: Path, limit_s: float) -> dict[str, dict[str, object]]:
    """Test each fault that has no result yet. Returns all results, by the fault's id.

    Raises:
        SystemExit: when an area's tests fail without a fault.
    """
    results = json.loads(results_file.read_text()) if results_file.is_file() else {}
    waiting = [fault for fault in faults if fault.id not in results]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Copy(Path(folder), limit_s)
        for area in dict.fromkeys(fault.area for fault in waiting):
            result, name, seconds = tree.test(area)
            print(f"{area}: tests without a fault take {seconds:.0f} s", flush=True)
            if result != SURVIVED:
                sys.exit(f"{area}: its tests fail without a fault ({result}): {name}")
            for fault in (fault for fault in waiting if fault.area == area):
                result, name, seconds = tree.with_fault(fault)
                facts = {"result": result, "test": name, "seconds": round(seconds, 1)}
                results[fault.id] = {**asdict(fault), **facts}
                results_file.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{result:11} {fault.file} {fault.function}: {fault.after}", flush=True)
    return results


def main() -> int:
    """Draw faults or test them. Returns 1 when one survived, came late, or is gone."""
    parser = argparse.ArgumentParser(prog="scripts/planted-faults", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="draw faults and write them to a file")
    drawing.add_argument("--seed", type=int, default=44, help="seed of the draw")
    drawing.add_argument("--count", type=int, default=100, help="number of faults")
    running = commands.add_parser("run", help="plant faults and run the tests of their areas")
    running.add_argument(
        "--out",
        type=Path,
        default=Path("planted-results.json"),
        help="results; a run goes on from those that are there",
    )
    running.add_argument(
        "--area", choices=sorted(AREAS), action="append", help="only this area; may be repeated"
    )
    running.add_argument("--each", type=int, metavar="N", help="only the first N of each area")
    running.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help="limit of a fault's tests",
    )
    for command in (drawing, running):
        command.add_argument(
            "--faults", type=Path, default=FAULTS, metavar="FILE", help="the drawn faults"
        )
    args = parser.parse_args()
    if args.command == "draw":
        rows = [asdict(fault) for fault in draw(args.seed, args.count)]
        args.faults.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{args.faults}: {len(rows)} faults")
        return 0
    every = [Fault(**row) for row in json.loads(args.faults.read_text())]
    faults = [
        fault
        for area in args.area or AREAS
        for fault in [fault for fault in every if fault.area == area][: args.each]
    ]
    results = run(faults, args.out, args.limit)
    kinds = [str(results[fault.id]["result"]) for fault in faults]
    print(", ".join(f"{kind} {kinds.count(kind)}" for kind in (CAUGHT, SURVIVED, LATE, GONE)))
    return int(any(kind != CAUGHT for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())
