"""The process that runs the kernels: ``python -m fused_attention_proof.child PLAN``.

PLAN is a JSON file of the parent's. Answers are JSON lines on standard output, in the order of
the plan's trials, so that what is finished survives what hangs::

    {"event": "ready", "environment": {...}}
    {"event": "case", "trial": 7}        the inputs and the reference of its case are next
    {"event": "trial", "trial": 7}       its kernel is next
    {"event": "found", "trial": 7, "finding": {...}}
    {"event": "done"}

After an error that costs the CUDA context it ends with `CONTEXT_LOST`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tuner.config import Config
from tuner.errors import BenchmarkError, TunerError
from tuner.families import family
from tuner.measure.device import Device, environment
from tuner.measure.subjects import import_torch

from .binding import subject, writes_lse
from .cases import Case
from .prover import Setting
from .report import Finding

CONTEXT_LOST = 3
PEER = Config("vendor_sdpa", {"kernel": "flash2"})


def say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


def flash_attention_2(case: Case) -> Callable[..., torch.Tensor] | None:
    """PyTorch's flash backend where it takes the input."""
    call = family(PEER.family).vendor_call(case.problem, PEER, case.scale)
    return None if isinstance(call, str) else call


def main(path: str) -> int:
    plan = json.loads(Path(path).read_text())
    device = Device()
    import_torch(device)
    cuda = torch.device("cuda", device.index)
    facts = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(cuda)}
    say("ready", environment={**environment().facts, **facts})
    setting: Setting | None = None
    for trial in plan["trials"]:
        index, case = trial["index"], Case.from_json(plan["cases"][trial["case"]])
        config = Config.from_json(plan["configs"][trial["config"]])
        try:
            if setting is None or setting.case != case:
                say("case", trial=index)
                setting = None  # its memory first
                torch.cuda.empty_cache()
                setting = Setting(case, cuda, flash_attention_2(case))
                device.synchronize()
            say("trial", trial=index)
            bound = subject(device, case.problem, config, case.scale, plan["libraries"])
            takes_lse = writes_lse(case.problem, config, case.scale)
            finding = setting.prove(bound, takes_lse, device.synchronize)
        except (TunerError, RuntimeError) as exc:  # torch's errors are RuntimeErrors
            finding = Finding(faults=[f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"])
        say("found", trial=index, finding=finding.to_json())
        if finding.faults and not device.healthy():
            return CONTEXT_LOST
    say("done")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except BenchmarkError as exc:
        sys.exit(f"{exc}")
