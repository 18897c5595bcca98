"""Names that the tuner asks the installed ``cuda.bindings`` for, which fails without a word where
NVML has none, and on the GPU only where the driver has none.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import tuner

PACKAGE = Path(tuner.__file__).parent


def asked(function: str) -> Iterator[str]:
    """First arguments of all calls of a function of the module, as texts."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                first = node.args[0]
                if name == function and isinstance(first, ast.Constant):
                    yield str(first.value)


def test_the_driver_s_functions() -> None:
    names = {name for name in asked("call") if name.startswith("cu")}
    driver = importlib.import_module("cuda.bindings.driver")
    assert len(names) > 20 and not {name for name in names if not hasattr(driver, name)}
    attributes = {f"CU_DEVICE_ATTRIBUTE_{name}" for name in asked("attribute")}
    assert attributes and all(hasattr(driver.CUdevice_attribute, name) for name in attributes)


def test_nvml_s_functions_and_clocks() -> None:
    nvml = importlib.import_module("cuda.bindings.nvml")
    names = set(asked("_ask"))
    assert len(names) > 6 and not {name for name in names if not hasattr(nvml, name)}
    assert all(hasattr(nvml.ClockType, name) for name in asked("_clock"))
