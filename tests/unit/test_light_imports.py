"""`import tuner` and the quick commands load none of the heavy libraries."""

from __future__ import annotations

import json
import sys

import pytest
from programs import ran

HEAVY = {
    "alembic",
    "cuda",
    "cutlass_library",
    "fastapi",
    "jinja2",
    "jsonschema",
    "numpy",
    "nvMatmulHeuristics",
    "optuna",
    "prometheus_client",
    "psycopg",
    "pydantic",
    "rich",
    "scipy",
    "sklearn",
    "sqlalchemy",
    "transformers",
    "torch",
    "vl_convert",
    "yaml",
}


def modules_after(code: str) -> set[str]:
    """Modules that a fresh interpreter holds after `code`."""
    script = f"import contextlib, io, json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = ran(sys.executable, "-c", script)
    return set(json.loads(done.stdout.splitlines()[-1]))


def loaded_by(code: str) -> set[str]:
    """Top-level modules after `code`, and the `HEAVY` ones below them."""
    modules = modules_after(code)
    return {name.partition(".")[0] for name in modules} | (HEAVY & modules)


@pytest.mark.parametrize(
    "code",
    [
        "import tuner",
        "import tuner; tuner.AttentionProblem.parse('S=1024,D=64')",
        "import tuner; tuner.lookup, tuner.Config, tuner.Measurement, tuner.TunerError",
        "import tuner.families; tuner.families.families()",
        "import tuner.compile.artifacts",
        "import tuner; tuner.lookup(tuner.AttentionProblem.parse('S=1999,D=64'), gpu='H200')",
    ],
)
def test_importing_is_light(code: str) -> None:
    loaded = loaded_by(code)
    assert "tuner" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    "arguments", [["--help"], ["lookup", "--shape", "S=1024,D=64", "--gpu", "H200"]]
)
def test_quick_commands_are_light(arguments: list[str]) -> None:
    loaded = loaded_by(
        "from tuner.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main({arguments!r})"
    )
    assert "tuner" in loaded
    assert not loaded & HEAVY


def test_a_look_up_loads_no_trials_and_the_families_that_it_names() -> None:
    shape = "tuner.AttentionProblem.parse('S=1999,D=64')"
    modules = modules_after(f"import tuner\ntuner.lookup({shape}, gpu='H200')")
    assert {"tuner.families.fused_attention", "tuner.families.peers.sdpa"} <= modules
    others = ("trials", "fused_attention.draws", "triton_attention", "grouped_gemm", "peers.flex")
    assert not modules & {f"tuner.families.{name}" for name in others}


def test_the_probe_sees_a_heavy_import() -> None:
    assert "jinja2" in loaded_by("import tuner.compile.render")
