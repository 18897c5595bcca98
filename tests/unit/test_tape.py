"""Traced formulas: they say what the plain ones say, and do nothing twice or in vain."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tuner.families.tape import Tape, called, compiled, larger, names_in, smaller, where


def formula(a: Any, b: Any) -> tuple[Any, ...]:
    """Whatever traced functions do."""
    half = -(-a // 2)
    return (
        larger(half, b) * 3.5,
        smaller(half, b) - b / 7,
        where(a, 5, half, b) + 2,
        (b / 3) ** 0.25,
        1 * -half,
        10 // b,
        9.0 - a,
        8.0 / a,
        called(divmod, a, b)[1],
    )


def traced(results: Any, tape: Tape, arguments: str) -> Any:
    text = ", ".join(map(str, results))
    lines = tape.lines(Counter(names_in(text)))
    body = [f" {line}" for line in lines]
    return compiled("f", [f"def f({arguments}):", *body, f" return {text}"], tape.names), lines


def test_a_traced_formula_is_the_formula() -> None:
    tape = Tape()
    function, _ = traced(formula(tape.argument("a"), tape.argument("b")), tape, "a, b")
    for a in range(1, 12):
        for b in range(1, 12):
            assert function(a, b) == formula(a, b)


def test_equal_operations_are_done_once_and_what_nothing_needs_never() -> None:
    tape = Tape()
    a = tape.argument("a")
    twice, again, _ = a + 1, a + 1, a * 99
    assert twice is again
    _, lines = traced([twice * twice, twice / 3], tape, "a")
    assert [line for line in lines if "a + 1" in line] == [lines[0]]
    assert not any("99" in line for line in lines)


def test_known_numbers_are_folded() -> None:
    tape = Tape()
    a = tape.argument("a")
    negative = -a
    assert (a * 1, 1.0 * a, a // 1, -negative) == (a, a, a, a)
    assert larger(2, 3) == 3 and where(2, 1, "yes", "no") == "yes"


def test_a_loop_keeps_what_it_changes() -> None:
    tape = Tape()
    inner, a = Tape(tape), tape.argument("a")
    count = inner.argument("count")
    result = a * 2 + count
    uses = Counter(names_in(str(result)))
    (line,) = inner.lines(uses)
    (before,) = tape.lines(uses)
    assert "count" in line and "a * 2" not in line and before.endswith("a * 2")


def test_a_branch_on_what_is_not_known_is_refused() -> None:
    a = Tape().argument("a")
    with pytest.raises(TypeError):
        bool(a)
    with pytest.raises(TypeError):
        assert a > 1
