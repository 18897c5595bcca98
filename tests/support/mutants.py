"""Seeded mutations of configs: what a hostile document may hold in a config's place."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

from tuner.config import Config
from tuner.families.base import Domain, Family

MARK = "MARK1337"
"""Part of every text that is code: no rendered source may hold it."""

#: Texts that would change a source, a path, a page or a line of a log.
CODE = (
    f"0;if(threadIdx.x==177)*(volatile int*)0x10=1337;constexpr int {MARK}=0",
    f"64}}; __device__ int {MARK} = {{0",
    f'1, "x"); asm volatile("trap; // {MARK}")',
    f"1 /* {MARK} */",
    f'\n#include "{MARK}"\n',
    f"{{{{ cycler.__init__.__globals__['{MARK}'] }}}}",
    f"{{% include '{MARK}' %}}",
    f"__import__('os').system('{MARK}')",
    f"../../{MARK}",
    f"64\0{MARK}",
    f"<script>{MARK}</script>",
    f"\x1b[2J{MARK}",
    f"\u202e{MARK}",
    f"{MARK}, true",
    MARK,
    f"{MARK}{'a' * 300}",
)
#: Words that look like others, or belong to nobody.
LIKE_WORDS = ("", " ", "None", "true", "TRUE", "nan", "Auto", "\uff16\uff14", "\u0410longM", "0x40")
HUGE = (2**31, 2**53 + 1, 2**63, 2**64, 10**30, 10**5000, -(2**63))
NAMES = (
    MARK,
    "id",
    "self",
    "__class__",
    "dtype",
    "stages",
    "x" * 300,
    "",
    "tile_m ",
    "tile\u2010m",
)

Raw = dict[str, Any]
"""A config as JSON, with anything in it."""


def mutants(member: Family, legal: list[Config], rng: random.Random) -> Iterator[Raw]:
    """Endless: each a legal config of the family after one to three mutations."""
    words = words_of(member)
    while True:
        raw = copy.deepcopy(rng.choice(legal).to_json())
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(MUTATIONS)(raw, member, words, rng)
        yield raw


def words_of(member: Family) -> list[str]:
    """Text that parameters of the family may have."""
    domains = [domain for domain in member.domains.values() if not isinstance(domain, range)]
    return sorted({value for domain in domains for value in domain if isinstance(value, str)})


def as_config(raw: Raw) -> Config:
    """Past every check of `Config.from_json`."""
    stages = {name: as_config(stage) for name, stage in raw.get("stages", {}).items()}
    return Config(raw["family"], raw["params"], stages)


def is_declared(raw: Raw, member: Family) -> bool:
    """True if the family declares every name, type and value."""
    stages = raw.get("stages", {})
    return (
        raw["family"] == member.name
        and set(member.domains) - member.optional <= set(raw["params"]) <= set(member.domains)
        and all(_holds(member.domains[name], value) for name, value in raw["params"].items())
        and list(stages) == sorted(member.stage_families)
        and all(is_declared(stages[name], of) for name, of in member.stage_families.items())
    )


def _holds(domain: Domain, value: object) -> bool:
    if isinstance(domain, range):
        return type(value) is int and domain[0] <= value <= domain[-1]
    return any(type(value) is type(known) and value == known for known in domain)


# Each takes (raw, member, words, rng) and changes `raw`.


def _value(raw: Raw, member: Family, words: list[str], rng: random.Random) -> None:
    """Another value of any type."""
    params = raw["params"]
    if params:
        name = rng.choice(list(params))
        present = params[name]
        is_huge = isinstance(present, int) and present.bit_length() > 64
        params[name] = rng.choice(VALUES)(1 if is_huge else present, rng)


def _other_value(raw: Raw, member: Family, words: list[str], rng: random.Random) -> None:
    """A value that some parameter of the family may have, this one perhaps."""
    if raw["params"]:
        name, other = rng.choice(list(raw["params"])), rng.choice(list(member.domains))
        raw["params"][name] = rng.choice(member.tried(other) or (0,))


def _word(raw: Raw, member: Family, words: list[str], rng: random.Random) -> None:
    if raw["params"] and words:
        raw["params"][rng.choice(list(raw["params"]))] = rng.choice(words)


def _drop(raw: Raw, member: Family, words: list[str], rng: random.Random) -> None:
    if raw["params"]:
        del raw["params"][rng.choice(list(raw["params"]))]


def _add(raw: Raw, member: Family, words: list[str], rng: random.Random) -> None:
    name = rng.choice((*NAMES, *member.domains))
    raw["params"][name] = rng.choice((0, 1, True, "", *words, *CODE))


def _rename(raw: Raw, member: Family, words: list[str], rng: random.Random) -> None:
    if raw["params"]:
        name = rng.choice(list(raw["params"]))
        value = raw["params"].pop(name)
        changed = (name.upper(), f"{name} ", f"{name}\n", f"_{name}", rng.choice(NAMES))
        raw["params"][rng.choice(changed)] = value


def _swap(raw: Raw, member: Family, words: list[str], rng: random.Random) -> None:
    if len(raw["params"]) > 1:
        one, other = rng.sample(list(raw["params"]), 2)
        params = raw["params"]
        params[one], params[other] = params[other], params[one]


def _family(raw: Raw, member: Family, words: list[str], rng: random.Random) -> None:
    raw["family"] = rng.choice(("gemm", "softmax", "Gemm", "", MARK, f"{member.name} "))


def _stages(raw: Raw, member: Family, words: list[str], rng: random.Random) -> None:
    """A stage too many, too few, under another name, or nested."""
    stages = raw.setdefault("stages", {})
    inner = copy.deepcopy({**raw, "stages": {}})
    match rng.randrange(4):
        case 0:
            stages[rng.choice((MARK, "qk", "0"))] = inner
        case 1 if stages:
            del stages[rng.choice(list(stages))]
        case 2 if stages:
            stages[rng.choice(list(stages))]["stages"] = {"qk": inner}
        case _:
            stages["pv"] = {**inner, "params": {}}


def _inside(raw: Raw, member: Family, words: list[str], rng: random.Random) -> None:
    """Any mutation, of one of the stages."""
    stages = raw.get("stages", {})
    known = [name for name in member.stage_families if name in stages]
    if known:
        name = rng.choice(known)
        inner = rng.choice((_value, _other_value, _drop, _add, _rename, _swap, _family))
        inner(stages[name], member.stage_families[name], words, rng)


MUTATIONS = (
    *(_value, _value, _value, _other_value, _other_value, _word, _drop, _add, _rename, _swap),
    *(_family, _stages, _inside, _inside),
)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 1


VALUES: tuple[Callable[[Any, random.Random], Any], ...] = (
    lambda value, rng: rng.choice(CODE),
    lambda value, rng: rng.choice(CODE),
    lambda value, rng: rng.choice(LIKE_WORDS),
    lambda value, rng: rng.choice(HUGE),
    lambda value, rng: _number(value) + rng.choice((-2, -1, 1, 2, 8, 16, 64)),
    lambda value, rng: _number(value) * rng.choice((-1, 0, 2, 3, 1000)),
    lambda value, rng: rng.randrange(0, 600),
    lambda value, rng: float(_number(value)),
    lambda value, rng: rng.choice((0.5, -0.0, 1e308)),
    lambda value, rng: bool(value),
    lambda value, rng: not value,
    lambda value, rng: int(value) if isinstance(value, bool) else str(value),
    lambda value, rng: f"{value}\n",
    lambda value, rng: f"{value} ",
    lambda value, rng: f"{value}{rng.choice(CODE)}",
    lambda value, rng: str(value).swapcase(),
    lambda value, rng: None,
    lambda value, rng: [value],
    lambda value, rng: {"value": value},
    lambda value, rng: [[[[[[[[value]]]]]]]],
)
