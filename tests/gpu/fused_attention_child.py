"""Proves fused kernels on drawn cases, in a process that may hang or die.

Called by `test_fused_attention_gpu.py` with a JSON of cases, configs, libraries and trials on the
standard input; prints a finding as JSON for each trial.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from fused_attention_proof.binding import subject, writes_lse
from fused_attention_proof.cases import Case
from fused_attention_proof.prover import Finding, Setting

from tuner.config import Config
from tuner.errors import TunerError
from tuner.families import family
from tuner.measure.device import Device
from tuner.measure.subjects import import_torch

PEER = Config("vendor_sdpa", {"kernel": "flash2"})


def flash_attention_2(case: Case) -> Callable[..., torch.Tensor] | None:
    """PyTorch's flash backend where it takes the input."""
    call = family(PEER.family).vendor_call(case.problem, PEER, case.scale)
    return None if isinstance(call, str) else call


def main(wanted: Mapping[str, Any]) -> None:
    """Prove every trial; the inputs and the reference of a case serve all that follow with it."""
    device, setting = Device(), None
    import_torch(device)
    cuda = torch.device("cuda", device.index)
    cases = [Case.from_json(one) for one in wanted["cases"]]
    configs = [Config.from_json(one) for one in wanted["configs"]]
    for case, config in ((cases[i], configs[j]) for i, j in wanted["trials"]):
        try:
            if setting is None or setting.case != case:
                setting = None  # its memory first
                torch.cuda.empty_cache()
                setting = Setting(case, cuda, flash_attention_2(case))
                device.synchronize()
            bound = subject(device, case.problem, config, case.scale, wanted["libraries"])
            takes_lse = writes_lse(case.problem, config, case.scale)
            finding = setting.prove(bound, takes_lse, device.synchronize)
        except (TunerError, RuntimeError) as exc:  # torch's errors are RuntimeErrors
            finding = Finding(faults=[f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"])
        print(json.dumps(asdict(finding)), flush=True)
        if finding.faults and not device.healthy():
            sys.exit(f"the CUDA context is lost: {finding.faults[-1]}")


if __name__ == "__main__":
    main(json.load(sys.stdin))
