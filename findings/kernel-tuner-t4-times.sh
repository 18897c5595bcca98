#!/usr/bin/env bash
# Kernel Tuner 1.5.0 writes T4 results whose keys of times are not those of the schema in its own
# wheel (`compilation`, not `compilation_time`), and the schema lets that pass. A configuration that
# failed to compile has the correctness 1. A reader that trusts the schema finds no compile time,
# and must take `invalidity`, not `correctness`, for whether a result counts.
# Exits non-zero if this changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q kernel_tuner==1.5.0 jsonschema==4.25.1
"$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

import jsonschema
from kernel_tuner import util
from kernel_tuner.file_utils import get_t4_results, output_file_schema

times = dict.fromkeys(
    ("compile_time", "benchmark_time", "framework_time", "strategy_time", "verification_time"), 1.0
)
passed = {"tile": 64, "time": 0.5, "times": [0.5, 0.5], **times}
failed = {"tile": 512, "time": "failed", "__error__": util.CompilationFailedConfig(), **times}
document = json.loads(
    json.dumps(get_t4_results([passed, failed], {"tile": [64, 512]}), default=str)
)
_, schema = output_file_schema("results")
schema = schema if isinstance(schema, dict) else json.loads(schema)
jsonschema.validate(document, schema)
listed = schema["properties"]["results"]["items"]["properties"]["times"]["properties"]
written = document["results"][0]["times"]
print("kernel_tuner", version("kernel_tuner"))
print("times in the schema:", sorted(listed))
print("times in a result:  ", sorted(written))
for row in document["results"]:
    print(row["configuration"], row["invalidity"], "correctness", row["correctness"])
assert "compilation_time" in listed and "compilation_time" not in written
assert "compilation" in written and "compilation" not in listed
assert document["results"][1]["invalidity"] == "compile"
assert document["results"][1]["correctness"] == 1
PYTHON
