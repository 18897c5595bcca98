#!/usr/bin/env bash
# Optuna 5: programs that open one new SQLite storage together, as the workers of a study do, fail
# while they make its schema, although each of them would succeed alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet optuna==5.0.0 sqlalchemy==2.1.9 alembic==1.20.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import collections
import re
import subprocess
import sys

import alembic
import optuna
import sqlalchemy

OPEN = """
import sys, optuna
sys.stdin.readline()
optuna.create_study(storage=sys.argv[1], study_name="study", load_if_exists=True)
"""
folder, workers, rounds = sys.argv[1], 6, 5
versions = {module.__name__: module.__version__ for module in (optuna, sqlalchemy, alembic)}
print(versions)
faults = collections.Counter()
for number in range(rounds):
    command = [sys.executable, "-c", OPEN, f"sqlite:///{folder}/{number}.db"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(workers)]
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        _, said = process.communicate()
        if process.returncode:
            faults[re.findall(r"^sqlite3\.\w+: .*$", said, re.MULTILINE)[-1]] += 1
failed = sum(faults.values())
print(f"{failed} of {workers * rounds} programs failed")
for text, count in faults.most_common():
    print(f"  {count} times {text}")
sys.exit(0 if failed else 1)
PYTHON
