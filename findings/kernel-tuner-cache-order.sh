#!/usr/bin/env bash
# Kernel Tuner 1.5.0 tells a closed cache file by its last three characters. The same JSON with its
# keys sorted, as `json.tool --sort-keys` writes it, is taken for a file that a killed run left open:
# brackets are added to what is read, and reading ends with JSONDecodeError. `cache` must be last.
# Exits non-zero if this changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q kernel-tuner==1.5.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import json
from importlib.metadata import version
from pathlib import Path

from kernel_tuner.util import read_cache

row = {"tile": 64, "time": 0.5, "times": [0.5], "compile_time": 0, "verification_time": 0}
document = {
    "schema_version": "1.0.0",
    "device_name": "a GPU",
    "kernel_name": "a kernel",
    "problem_size": [1],
    "tune_params_keys": ["tile"],
    "tune_params": {"tile": [64]},
    "objective": "time",
    "cache": {"64": row},
}
texts = {
    "cache last": json.dumps(document, indent=1),
    "sorted": json.dumps(document, indent=1, sort_keys=True),
}
print("kernel_tuner", version("kernel_tuner"))
seen = {}
for name, text in texts.items():
    path = Path("cache.json")
    path.write_text(text)
    try:
        seen[name] = len(read_cache(path, open_cache=False)["cache"])
    except json.JSONDecodeError as error:
        seen[name] = type(error).__name__
    print(f"{name}: {seen[name]}")
assert seen == {"cache last": 1, "sorted": "JSONDecodeError"}, seen
PYTHON
