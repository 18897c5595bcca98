"""GPU draft of products' portfolios: build, proofs, then a survey in the stream regime.

In the root of branch `products`:  PYTHONPATH=$PWD python3 .draft/products_draft.py OUT SECONDS
1. builds the pool (77 kernels, and about 40 more in bf16 for the survey), 2. proves it,
3. times the pool and cuBLAS behind an element-wise kernel, weights cold, at products of the models
that selections are made from. Recordings go to OUT/recordings.
"""
from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

OUT, LIMIT = Path(sys.argv[1]), float(sys.argv[2])
STARTED = time.monotonic()
os.environ.setdefault("TUNER_CACHE_DIR", "/tmp/products-cache")


def left() -> float:
    return LIMIT - (time.monotonic() - STARTED)


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", flush=True)


def tuner(*arguments: str, limit: float) -> int:
    say("tuner " + " ".join(arguments))
    try:
        done = subprocess.run([sys.executable, "-P", "-m", "tuner", *arguments], timeout=limit,
                              capture_output=True, text=True)
    except subprocess.TimeoutExpired as exc:
        say(f"timed out after {limit:.0f} s; the end of what it said: {(exc.stderr or b'')[-1500:]!r}")
        return 124
    lines = (done.stdout + done.stderr).splitlines()
    kept = [x for x in lines if "not served" in x or "failed" in x or "Error" in x][:25] + lines[-6:]
    for line in dict.fromkeys(kept):
        say("   " + line[:400])
    return done.returncode


def problems():
    """bf16 products by domain, one layer's widths after the other."""
    from tuner.problem import GemmProblem, SwigluProblem
    from tuner.problem.population import draw, subset
    from tuner.selection.domains import Domain
    found = defaultdict(lambda: defaultdict(dict))
    for call in draw("survey", 4000, subset("making")):
        p = call.problem
        if isinstance(p, GemmProblem | SwigluProblem) and p.flops <= 4e11:
            p = replace(p, dtype="bfloat16", **({"dtype_d": "bfloat16"} if p.op == "gemm" else {}))
            d = Domain.of(p)
            if d is not None:
                found[d][p.n, p.k][p] = None
    taken = {}
    for d, groups in found.items():
        lists = [list(x) for x in groups.values()]
        turns = [x[i] for i in range(max(map(len, lists))) for x in lists if i < len(x)]
        taken[d] = turns
    return taken


KEEP = {"few": 28, "narrow": 24, "wide": 24}
EXTRA = {"few": 3, "narrow": 8, "wide": 5}


def compiled(config):
    from tuner.config import Config
    from tuner.families import families
    names = families()[config.family].runtime_parameters
    return Config(config.family, {k: v for k, v in config.params.items() if k not in names})


def variants(problem, kernel, gpu):
    from tuner.config import Config
    from tuner.families import families
    family = families()[kernel.family]
    if kernel.family == "gemv":
        ways = [dict(persistent=p, pdl=d, lead=n) for p in (True, False)
                for d, n in ((True, 1024), (False, 0))]
    elif kernel.get("kernel_schedule") == "TmaWarpSpecialized":
        ways = [{}, {"pdl": True}]
    elif kernel.get("tile_scheduler") == "StreamK":
        ways = [{"raster_order": "AlongM", "max_swizzle_size": 1, "decomposition_mode": "StreamK"}]
        ways += [{"raster_order": "AlongM", "max_swizzle_size": 1, "decomposition_mode": "SplitK",
                  "splits": s} for s in (2, 3, 4, 6, 8)]
    else:
        short = min(problem.m, problem.n) <= 256
        ways = [{"raster_order": r, "max_swizzle_size": s}
                for r, s in ((("AlongM", 1), ("AlongN", 1)) if short else
                             (("AlongM", 1), ("AlongN", 1), ("AlongM", 4), ("AlongN", 4)))]
        if short:
            ways += [{**w, "pdl": True} for w in ways[:1]]
    legal = []
    for way in ways:
        config = Config(kernel.family, {**kernel.params, **way})
        if not family.accepts(problem, config, gpu):
            continue
        if way.get("decomposition_mode") == "SplitK" and way["splits"] not in family.splits(problem, config, gpu):
            continue
        legal.append(config)
    splits = sorted((c for c in legal if c.get("splits")),
                    key=lambda c: family.predict_us(problem, c, gpu))[:2]
    return [c for c in legal if not c.get("splits")] + splits


def main() -> None:
    from tuner.families import families_of
    from tuner.hardware import DEFAULT_GPU
    from tuner.selection.portfolio import shipped

    tuner("build", "--portfolio", "--op", "gemm", limit=max(60, left() - 120))
    tuner("build", "--portfolio", "--op", "swiglu", limit=max(60, left() - 100))
    tuner("prove", "--op", "gemm", "--time-limit", "150", limit=170)
    tuner("prove", "--op", "swiglu", "--time-limit", "40", limit=60)
    if left() < 45:
        say("no time for the survey")
        return

    portfolios = {one.op: one for one in shipped() if one.op != "attention"}
    gpu = DEFAULT_GPU
    samples = []
    from tuner.config import Config
    from tuner.families import families
    from tuner.tuning.survey import Sample, Survey
    extra_pool = {}
    for domain, drawn in problems().items():
        models = portfolios[domain.op].models_of(domain)
        if models is None and domain.op == "gemm":
            continue
        kept = drawn[: KEEP[domain.rows] if not getattr(domain, "epilogue", "") else KEEP[domain.rows] // 2]
        known = {}
        if models is not None:
            known = dict.fromkeys(compiled(c.config) for c in models.candidates if not c.is_vendor)
        # more kernels by the estimates, out of the plain product's spaces
        key = domain.op, domain.rows
        if key not in extra_pool and not getattr(domain, "epilogue", ""):
            own = [f for f in families_of(domain.op).values() if f.work_terms and not f.is_vendor]
            scores = defaultdict(list)
            for problem in kept[:12]:
                best = {}
                for family in own:
                    for config in family.space(problem, gpu):
                        us = family.predict_us(problem, config, gpu)
                        one = compiled(config)
                        best[one] = min(us, best.get(one, math.inf))
                least = min(best.values())
                for rank, one in enumerate(sorted(best, key=best.get)[:6]):
                    scores[one].append(2 ** -rank)
            ranked = sorted(scores, key=lambda c: -sum(scores[c]))
            count = EXTRA[domain.rows] + (0 if known else 3)
            stream = [c for c in ranked if c.get("tile_scheduler") == "StreamK"][:2]
            extra_pool[key] = [c for c in dict.fromkeys([*stream, *ranked]) if c not in known][:count]
        kernels = [*known, *(extra_pool.get(key, []) if not getattr(domain, "epilogue", "") else [])]
        vendor = families_of(domain.op)["vendor_blas" if domain.op == "gemm" else "vendor_swiglu"]
        theirs = tuple(c for c in vendor.space(kept[0], gpu) if c["kernel"] in domain.vendors)
        for number, problem in enumerate(kept):
            groups = [tuple(variants(problem, kernel, gpu)) for kernel in kernels]
            groups = [g for g in groups if g] + [theirs]
            samples.append((number, Sample(problem, tuple(groups), {})))
        say(f"{domain.op} {domain.label()}: {len(kept)} problems, {len(kernels)} kernels")
    samples = [one for _, one in sorted(samples, key=lambda x: x[0])]
    say(f"{len(samples)} problems, {sum(s.candidates for s in samples)} candidates")
    if "--dry" in sys.argv:
        return
    from tuner.measurement import Regime
    from tuner.runners.choose import Machine, Runners
    from tuner.runners.gpus import parse_devices
    folder = OUT / "recordings"
    folder.mkdir(parents=True, exist_ok=True)
    with Runners(Machine(parse_devices("0"), None, replay=False), lambda text: None) as runners:
        survey = Survey(samples, lambda problem: Regime("stream", "cold"), runners.of, folder, together=64,
                        time_limit_s=max(20.0, left() - 15))
        done = survey.run()
    whole = sum(p.is_complete for p in done)
    say(f"{whole} of {len(done)} problems complete, {sum(len(p.seen) for p in done)} candidates timed")
    # The portfolio's choice over cuBLAS, as measured now
    rows = defaultdict(list)
    for p in done:
        us = {m.config: m.latency_us for m in p.seen if m.ok and m.latency_us}
        theirs = [t for c, t in us.items() if c.family.startswith("vendor")]
        own = [t for c, t in us.items() if not c.family.startswith("vendor")]
        bad = [m for m in p.seen if not m.ok]
        if bad:
            say(f"   {p.sample.problem.label()}: {bad[0].config.family} {bad[0].status} {bad[0].log[:150]}")
        if not theirs or not own:
            continue
        from tuner.selection.domains import Domain
        rows[Domain.of(p.sample.problem).label()].append(min(theirs) / min(own))
    for label, x in sorted(rows.items()):
        x.sort()
        say(f"{label}: best own of {len(x)} problems over PyTorch's: geometric mean "
            f"{math.exp(sum(map(math.log, x)) / len(x)):.3f}, least {x[0]:.2f}, most {x[-1]:.2f}")


main()
