"""Plans of own kernels that no decision chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.config import Config
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import Problem


def own_plan(problem: Problem, config: Config, artifacts: Mapping[str, str]) -> Any:
    """A plan (`tuner.runtime.call.plan`) of a config on this GPU, or a text why there is none.

    Args:
        problem: problem to compute.
        config: config of an own family.
        artifacts: keys of its compiled kernels by their names.
    """
    from tuner.runtime.call import devices
    from tuner.runtime.call.plan import Plan, Posed, plan_of

    known = Measurement(
        problem,
        config,
        devices.gpu_of(0),
        Regime(),
        Status.OK,
        Provenance.PREDICTED,
        artifacts=dict(artifacts),
    )
    plan = plan_of(Posed(problem), known, 0)
    return plan if isinstance(plan, Plan) else str(plan)
