"""The process of an engine for ``scripts/bench engines``: a program of one argument.

The argument is JSON: a class of `SERVERS` by ``name`` and its fields. Questions are `START`, `RUN`
and `ANSWERS`. An engine of several ranks has a process for each; rank 0's starts the others and
asks them what it is asked.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.child import answer_indices
from benchmarks.engines_servers import Batching, Load, Vllm
from benchmarks.engines_sglang import Sglang
from tuner.base.processes import python_command, python_environment

START, RUN, ANSWERS = range(3)
"""Questions: start the engine, time its requests, tell what it answers beside times."""
LOST = '{"lost": "its process ended"}'
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
    functions = server.start, server.run, server.answers
    if isinstance(server, Vllm) and server.ranks > 1 and server.rank == 0:
        return of_ranks(functions, server)
    return lambda question: functions[question]()


def of_ranks(
    functions: Sequence[Callable[[], dict[str, Any]]], server: Vllm
) -> Callable[[int], dict[str, Any]]:
    """Rank 0's answers, with ``ranks``: calls of each other rank, and whether its tokens are equal.

    Args:
        functions: rank 0's, by question.
        server: rank 0.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(server.ranks)}
    os.environ.update(place, RANK="0", LOCAL_RANK="0")
    others = [  # of this process's group: they end with it
        subprocess.Popen(
            command_of(replace(server, rank=rank)),
            env={**python_environment(), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, server.ranks)
    ]

    def ask(question: int) -> dict[str, Any]:
        for process in others:
            print(question, file=process.stdin, flush=True)
        answer = functions[question]()
        told = [
            json.loads((process.stdout and process.stdout.readline()) or LOST) for process in others
        ]
        if lost := next((of_one["lost"] for of_one in told if "lost" in of_one), ""):
            return {"lost": f"another rank: {lost}"}
        return {**answer, "ranks": [_beside(of_one, answer) for of_one in told]}

    return ask


def _beside(told: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A rank's hits and refusals, and whether its tokens equal ours."""
    pairs = [
        (told["concurrency"][count].get("tokens"), served.get("tokens"))
        for count, served in own.get("concurrency", {}).items()
    ]
    calls: dict[str, Any] = {name: told[name] for name in ("hits", "refused") if name in told}
    return {**calls, "is_equal": all(theirs == mine for theirs, mine in pairs)}


if __name__ == "__main__":
    sys.exit(answer_indices(asked(sys.argv[1])))
