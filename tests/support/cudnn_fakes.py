"""cuDNN's Python frontend without cuDNN: a graph of attention, plans by engine and knobs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

VERSION = 91900
DTYPES = {"HALF": torch.float16, "BFLOAT16": torch.bfloat16}
#: (engine, knobs) by heuristic: one is in two lists, and one engine has knobs nobody knows.
PLANS: Mapping[str, tuple[tuple[int, dict[str, int]], ...]] = {
    "A": ((10, {"KERNEL_CFG": 1, "TILE_M": 128}), (10, {"KERNEL_CFG": 2, "TILE_M": 64})),
    "B": ((10, {"KERNEL_CFG": 2, "TILE_M": 64}),),
    "FALLBACK": ((4, {}), (7, {"UNHEARD_OF": 3}), (-1, {})),
}
BROKEN = 4
"""The engine whose plan cannot be built."""


class Refused(Exception):
    """cudnnGraphNotSupportedError."""


class Tensor:
    def __init__(self, **facts: Any) -> None:
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        def put(value: Any) -> Tensor:
            self.facts[name.removeprefix("set_")] = value
            return self

        return put


class FakeCudnn:
    """The module; `graphs` holds those that were made, `executed` what was run."""

    def __init__(self) -> None:
        cudnn = self
        self.version = VERSION
        self.graphs: list[Any] = []
        self.executed: list[tuple[int, dict[str, int], int]] = []
        self.streams: dict[int, int] = {}
        self.has_unified = True
        kinds = sorted({name for plans in PLANS.values() for _, k in plans for name in k})
        self.knob_type = Enum("knob_type", kinds)  # type: ignore[misc]
        self.heur_mode = Enum("heur_mode", list(PLANS))  # type: ignore[misc]
        self.attention_implementation = SimpleNamespace(
            AUTO="AUTO", COMPOSITE="COMPOSITE", UNIFIED="UNIFIED"
        )
        self.diagonal_alignment = SimpleNamespace(TOP_LEFT="TOP_LEFT")
        self.data_type = SimpleNamespace(HALF="HALF", BFLOAT16="BFLOAT16", FLOAT="FLOAT")
        self.cudnnGraphNotSupportedError = Refused

        class Graph(FakeGraph):
            def __init__(self, **options: Any) -> None:
                super().__init__(cudnn, **options)

        self.pygraph = Graph

    def backend_version(self) -> int:
        return self.version

    def create_handle(self) -> int:
        return len(self.streams) + 1

    def set_stream(self, handle: int, stream: int) -> None:
        self.streams[handle] = stream


class FakeGraph:
    def __init__(self, cudnn: FakeCudnn, **options: Any) -> None:
        self.cudnn, self.options = cudnn, options
        self.inputs: list[Tensor] = []
        self.plans: list[tuple[int, dict[str, int]]] = []
        self.built: set[int] = set()
        cudnn.graphs.append(self)

    def tensor(self, **facts: Any) -> Tensor:
        self.inputs.append(Tensor(**facts))
        return self.inputs[-1]

    def sdpa(self, **arguments: Any) -> list[Any]:
        self.arguments, self.out = arguments, Tensor()
        return [self.out, None]

    def validate(self) -> None:
        assert self.arguments["generate_stats"] is False

    def build_operation_graph(self) -> None:
        if self.arguments["implementation"] == "UNIFIED" and not self.cudnn.has_unified:
            raise Refused("one operation of attention needs another GPU")

    def create_execution_plans(self, heuristics: list[Any]) -> None:
        assert not self.plans, "planned once a graph"
        self.plans += [plan for one in heuristics for plan in PLANS[one.name]]

    def create_execution_plan(self, engine: int, knobs: Mapping[Any, int]) -> None:
        named = {kind.name: value for kind, value in knobs.items()}
        if (engine, named) not in [plan for plans in PLANS.values() for plan in plans]:
            raise RuntimeError(f"engine {engine} has no such knobs")
        self.plans.append((engine, named))

    def get_execution_plan_count(self) -> int:
        return len(self.plans)

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[int, dict[Any, int]]:
        engine, knobs = self.plans[index]
        return engine, {self.cudnn.knob_type[name]: value for name, value in knobs.items()}

    def build_plan_at_index(self, index: int) -> None:
        if self.plans[index][0] == BROKEN:
            raise Refused("no such kernel")
        self.built.add(index)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return 1000 * self.plans[index][0]

    def execute_plan_at_index(
        self, tensors: Mapping[int, Any], workspace: Any, index: int, handle: int
    ) -> None:
        assert index in self.built
        engine, knobs = self.plans[index]
        assert workspace.numel() >= 1000 * engine
        self.cudnn.executed.append((engine, knobs, handle))
        names = {one.facts["name"]: tensors[one.facts["uid"]] for one in self.inputs}
        for one in self.inputs:
            given = tensors[one.facts["uid"]]
            assert list(given.shape) == one.facts["dim"]
            assert list(given.stride()) == one.facts["stride"]
            assert given.dtype == DTYPES[one.facts["data_type"]]
        out = tensors[self.out.facts["uid"]]
        assert list(out.shape) == self.out.facts["dim"]
        assert list(out.stride()) == self.out.facts["stride"]
        out.copy_(self._attend(names))

    def _attend(self, names: Mapping[str, Any]) -> Any:
        query, key, value = (names[name].double() for name in ("query", "key", "value"))
        group = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
        scores = self.arguments["attn_scale"] * query @ key.mT
        if "bias" in names:
            assert self.arguments["bias"] in self.inputs
            scores = scores + names["bias"]
        rows, columns = (torch.arange(n) for n in scores.shape[-2:])
        ahead = columns - rows[:, None]
        hidden = torch.zeros(ahead.shape, dtype=torch.bool)
        right = self.arguments.get("diagonal_band_right_bound")
        left = self.arguments.get("diagonal_band_left_bound")
        if right is not None or left is not None:
            assert self.arguments["diagonal_alignment"] == "TOP_LEFT"
        if right is not None:
            hidden |= ahead > right
        if left is not None:  # as many keys as it says, the query's own among them
            hidden |= ahead <= -left
        return scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0) @ value
