"""The process of an engine for ``scripts/bench engines``: a program of one argument.

The argument is JSON: a class of `SERVERS` by ``name`` and its fields. Questions are `START`, `RUN`
and `ANSWERS`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.child import answer_indices
from benchmarks.engines_servers import Batching, Load, Vllm
from benchmarks.engines_sglang import Sglang
from tuner.base.processes import python_command

START, RUN, ANSWERS = range(3)
"""Questions: start the engine, time its requests, tell what it answers beside times."""
Server = Vllm | Batching | Sglang
SERVERS: dict[str, Callable[..., Server]] = {
    server.__name__: server for server in (Vllm, Batching, Sglang)
}


def command_of(server: Server) -> list[str]:
    """Command of a process that is this engine."""
    fields = {name: value for name, value in vars(server).items() if not name.startswith("_")}
    spec = {**fields, "name": type(server).__name__, "load": asdict(server.load)}
    return python_command("-m", "benchmarks.engines_child", json.dumps(spec))


def asked(text: str) -> Callable[[int], dict[str, Any]]:
    """The function that answers the questions to a process of `command_of`, by its argument."""
    spec = json.loads(text)
    load = Load(**spec.pop("load"))
    server = SERVERS[spec.pop("name")](load=load, **spec)
    return lambda question: (server.start, server.run, server.answers)[question]()


if __name__ == "__main__":
    sys.exit(answer_indices(asked(sys.argv[1])))
