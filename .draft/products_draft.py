"""GPU draft of products' portfolios: build, proofs, then a survey in the stream regime.

In the root of branch `products`:  PYTHONPATH=$PWD python3 -P .draft/products_draft.py OUT SECONDS
Recordings of the survey go to OUT/recordings, the kernel list with the proofs to OUT/kernels.
"""
from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

OUT, LIMIT = Path(sys.argv[1]), float(sys.argv[2])
STARTED = time.monotonic()
CACHE = os.environ.setdefault("TUNER_CACHE_DIR", "/tmp/products-cache")


def left() -> float:
    return LIMIT - (time.monotonic() - STARTED)


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", flush=True)


def tuner(*arguments: str, limit: float) -> int:
    if limit < 15:
        say(f"no time left for: tuner {' '.join(arguments)}")
        return 1
    say("tuner " + " ".join(arguments))
    log = OUT / "log.txt"
    with log.open("a") as file:
        file.write("tuner " + " ".join(arguments) + "\n")
        file.flush()
        start = file.tell()
        process = subprocess.Popen([sys.executable, "-P", "-m", "tuner", *arguments],
                                   stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            code = 124
    lines = log.read_text()[start:].splitlines()
    words = ("not served", "failed", "Error", "Traceback")
    kept = [x for x in lines if any(word in x for word in words)][:20] + lines[-4:]
    for line in dict.fromkeys(kept):
        say("   " + line[:300])
    return code


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    folder = OUT / "recordings"
    folder.mkdir(exist_ok=True)
    tuner("build", "--portfolio", "--op", "gemm", limit=min(240, left() - 150))
    tuner("build", "--portfolio", "--op", "swiglu", limit=min(90, left() - 120))
    for op in ("gemm", "swiglu"):
        tuner("survey", str(folder), "--portfolio", "--op", op, "--compile",
              limit=min(100, left() - 100))
    tuner("survey", str(folder), "--portfolio", "--op", "gemm", "--time-limit",
          str(max(30, int((left() - 30) * 0.5))), limit=left() - 20)
    tuner("prove", "--op", "gemm", "--time-limit", str(max(15, int((left() - 15) * 0.6))),
          limit=left() - 10)
    tuner("survey", str(folder), "--portfolio", "--op", "swiglu", "--time-limit",
          str(max(15, int((left() - 10) * 0.5))), limit=left() - 8)
    tuner("prove", "--op", "swiglu", "--time-limit", str(max(10, int(left() - 8))), limit=left() - 3)
    if (lists := Path(CACHE) / "kernels").is_dir():
        shutil.copytree(lists, OUT / "kernels", dirs_exist_ok=True)
    from tuner.runners import recording
    from tuner.selection.domains import Domain
    rows = defaultdict(list)
    for path in sorted(folder.glob("*.json.gz")):
        for part in recording.read(path).walk():
            domain = Domain.of(part.problem)
            us = {m.config: m.latency_us for m in part.measurements if m.ok and m.latency_us}
            for m in part.measurements:
                if not m.ok:
                    say(f"   {part.problem.label()}: {m.config.family} {m.status} {m.log[:120]}")
                    break
            theirs = [t for c, t in us.items() if c.family.startswith("vendor")]
            own = [t for c, t in us.items() if not c.family.startswith("vendor")]
            if theirs and own:
                rows[f"{part.problem.op} {domain.label()}"].append(min(theirs) / min(own))
    for label, x in sorted(rows.items()):
        x.sort()
        mean = math.exp(sum(map(math.log, x)) / len(x))
        say(f"{label}: {len(x)} problems, best own over PyTorch's {mean:.3f} in the mean, "
            f"least {x[0]:.2f}, most {x[-1]:.2f}, own faster at {sum(r > 1 for r in x)}")


main()
