"""The contract of a kernel family.

A family is one module or folder here and, unless it is a vendor's, one template. It defines the
search space, the only legality predicate, the kernels of a config, their launches, and a cost
estimate. It is pure: no GPU, no compiler, and only the standard library at import.
"""

from __future__ import annotations

import copy
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, ClassVar, Self, TypeVar, final

from tuner.base import resources
from tuner.config import Config, Value
from tuner.errors import ConfigError, TunerError
from tuner.families.arguments import Arguments
from tuner.families.chip_work import Work
from tuner.families.invariance import Invariance
from tuner.families.library_calls import LibraryCalls
from tuner.families.schedules import Schedules
from tuner.hardware import OLDEST_CAPABILITY, Gpu
from tuner.problem import E4M3, AttentionProblem, Problem
from tuner.problem.attention import NARROW_HEAD_DIM

SCRATCH = "scratch"
"""Name of the family's own temporary buffer among the tensors of a `Launch`."""
LSE = "lse"
"""Name of attention's log-sum-exp among the tensors of a `Launch`: (B, H, SQ) contiguous fp32.
The natural logarithm of the sum of exp(scaled score); -inf for a query without a visible key. A
null pointer where it is not wanted.
"""

Strides = Mapping[str, tuple[int, ...]]
"""Strides of tensors, elements, by the operand's name: one for each of its dimensions."""

INCOMPATIBLE_CONFIG_ERRORS = (
    TunerError,
    ArithmeticError,
    AttributeError,
    LookupError,
    StopIteration,
    TypeError,
    ValueError,
)
"""Exceptions of a family on a config of another version: a parameter is missing, of another type,
or out of range.
"""

Domain = tuple[Value, ...] | range
"""Legal values of a parameter, all of one type: a list, or a range of integers."""

SHOWN_CHARACTERS = 80
"""Characters shown of a refused name or value."""


@dataclass(frozen=True)
class KernelSpec:
    """The compile-time half of a kernel: a template and the variables that render it.

    Variables are integers, booleans, and text that `words` declares. `tuner.compile.render` refuses
    anything else, so that no text of a config reaches the compiler.
    """

    template: str
    """File name under ``templates/``."""
    variables: Mapping[str, Value] = field(default_factory=dict)
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """All values of each variable that is text; constants of the family, never a config's."""
    arguments: Arguments | Mapping[str, Arguments] = field(default_factory=Arguments)
    """Declaration of the launch arguments that the template renders; a function of the variables. A
    library with several commands has one declaration for each, by name.
    """
    together: int = 1
    """Least kernels of a compiler's unit, where so many wait: they instantiate the same headers."""
    instances: tuple[str, ...] = ()
    """Variables that decide most of what the headers instantiate."""

    @cached_property
    def instance(self) -> str:
        """Text that is equal for kernels which cost little beside each other in a unit."""
        if not self.instances:
            return self.key
        return json.dumps([self.template, *map(self.variables.get, self.instances)])

    @cached_property
    def key(self) -> str:
        """Canonical text: equal specs compile to the same kernel."""
        return self.template + json.dumps(
            dict(self.variables), sort_keys=True, separators=(",", ":")
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelSpec) and self.key == other.key


@dataclass(frozen=True)
class Ref:
    """A device pointer: a problem's operand (or `SCRATCH`) plus an offset in bytes."""

    operand: str
    offset_bytes: int = 0


@dataclass(frozen=True)
class Launch:
    """One call of a compiled kernel.

    Every template exports the same C interface, with ID the artifact's key::

        int tuner_ID_workspace(const int64_t* integers, int64_t* bytes);
        int tuner_ID_launch(void* const* tensors, const int64_t* integers,
                            const double* scalars, void* workspace, void* stream);

    Both return 0, a positive cudaError_t, or a negative cutlass::Status. The order of tensors,
    integers and scalars is that of `KernelSpec.arguments`: `named` makes it.
    """

    kernel: str
    """Key of `Family.kernels`."""
    tensors: tuple[Ref, ...]
    integers: tuple[int, ...]
    scalars: tuple[float, ...] = ()
    lane: int = 0
    """Launches of one lane run in order. Different lanes are independent: they may overlap, each on
    its own stream.
    """

    @classmethod
    def named(
        cls,
        kernel: str,
        arguments: Arguments,
        tensors: Mapping[str, Ref],
        integers: Mapping[str, int],
        scalars: Mapping[str, float],
    ) -> Self:
        """A launch with its arguments given by name.

        Args:
            kernel: key of `Family.kernels`.
            arguments: the family's declaration of names and order.
            tensors: operand, or part of the scratch, of each tensor.
            integers: sizes, strides (elements) and flags.
            scalars: factors, as ``alpha``.

        Raises:
            ValueError: when `arguments` declares other names.
        """
        return cls(kernel, *arguments.ordered(tensors, integers, scalars))


_P = TypeVar("_P", bound=Problem)


def posed(problem: Problem, kind: type[_P], family: str) -> _P:
    """The problem as one of a family's operation.

    Raises:
        ConfigError: for another operation; it names the family.
    """
    if isinstance(problem, kind):
        return problem
    raise ConfigError(f"{family} serves {kind.op}, not {problem.op}")


class Family(Schedules, LibraryCalls, Invariance, ABC):
    """A kernel family; instances are stateless.

    Each has a name, an operation, `domains`, `conflicts`, `space` and `predict_us`. Compiled ones
    have `kernels` and `launches`. The mix-ins hold what only some have, with the others' answers.
    """

    name: ClassVar[str]
    op: ClassVar[str]
    """The `Problem.op` it serves."""
    capabilities: ClassVar[tuple[str, ...]] = ()
    """Compute capabilities that its kernels are written for; empty: every supported one."""
    takes_extras: ClassVar[bool] = True
    """True when the family handles e4m3 and `AttentionProblem.extras` itself; otherwise problems
    with them are refused.
    """
    takes_value_dim: ClassVar[bool] = False
    """True when the family handles values of another width than keys; otherwise such problems are
    refused.
    """
    takes_wide_heads: ClassVar[bool] = False
    """True when the family handles head dimensions above `NARROW_HEAD_DIM`; otherwise such problems
    are refused.
    """
    is_fallback: ClassVar[bool] = False
    """True for a family that takes part only when it is named, or when no other own family serves
    the problem.
    """
    kind: ClassVar[str] = ""
    """Kind of attention, for comparisons of kinds: ``fused``, or the number of its kernels."""
    peer: ClassVar[str] = ""
    """Name under which an own family takes part in comparisons as another language's peer."""
    runtime_parameters: ClassVar[frozenset[str]] = frozenset()
    """Parameters that do not change the compiled kernels."""
    tried_calls: ClassVar[Sequence[Mapping[str, Value]]] = ()
    """Those that a portfolio's candidates are timed with; empty: its operation's usual ones."""
    domains: ClassVar[Mapping[str, Domain]] = {}
    """Legal values of each parameter for any problem. Limits that depend on the problem, the GPU or
    other parameters are in `conflicts`.
    """
    optional: ClassVar[frozenset[str]] = frozenset()
    """Parameters that a config omits where they do not apply; `conflicts` checks that."""
    draws: ClassVar[Mapping[str, tuple[Value, ...]]] = {}
    """Sampled values of a parameter whose domain is a range; see `tried`."""
    stage_families: ClassVar[Mapping[str, Family]] = {}
    """The family of each stage's config, by stage name; empty where a config has no stages."""
    writes_lse: ClassVar[bool] = False
    """An attention family whose launches name `LSE` among their tensors."""
    cost_constants: ClassVar[Mapping[str, float]] = {}
    """Fitted constants of `predict_us` by name, all positive: the start of their fit.
    Empty where nothing is fitted."""
    proof_draws: ClassVar[str] = ""
    """Module below this package, and class there, that draws the trials of a proof, as
    ``gemm.draws:ProductDraw``; only a proof imports it. Empty for a family without proofs.
    """
    fit: ClassVar[tuple[str, str]] = ("", "")
    """NAME of `tuner develop fit`, and the module below this package that has its groups."""
    _refit: Mapping[str, float] | None = None
    _allowed: ClassVar[Mapping[str, tuple[type, frozenset[Value] | range]]] = {}
    """`domains` as `malformed` reads them: the type, and the values."""
    _required: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        """Make the tables of `malformed`.

        Raises:
            TypeError: when the class overrides `violations`, or a domain is empty, of several
                types, or a range without `draws`.
        """
        super().__init_subclass__(**options)
        if "violations" in vars(cls):
            raise TypeError(f"{cls.__name__} overrides violations: its rules belong in conflicts")
        allowed: dict[str, tuple[type, frozenset[Value] | range]] = {}
        for name, values in cls.domains.items():
            if isinstance(values, range):
                if name not in cls.draws:
                    raise TypeError(
                        f"{cls.__name__}: {name} has a range for a domain, and no draws"
                    )
                allowed[name] = (int, values)
                continue
            kinds = {type(value) for value in values}
            if len(kinds) != 1:
                raise TypeError(f"{cls.__name__}: the domain of {name} is not of one type")
            allowed[name] = (kinds.pop(), frozenset(values))
        cls._allowed = allowed
        cls._required = frozenset(cls.domains) - cls.optional

    @final
    def violations(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        """Why `config` cannot serve `problem` on `gpu`; empty when it is legal.

        The only legality predicate: pure, total (never raises) and complete (lists every reason).
        """
        reasons = [reason] if (reason := self.supports_config(problem, config, gpu)) else []
        reasons += self.malformed(config)
        return reasons or self.conflicts(problem, config, gpu)

    def supports_config(self, problem: Problem, config: Config, gpu: Gpu) -> str:
        """Reason of `supports`; overridden where kernels serve more than a search considers."""
        return self.supports(problem, gpu)

    @final
    def malformed(self, config: Config) -> list[str]:
        """Problem-independent reasons against `config`: names, types and values of its parameters,
        and its stages. Empty when it is well-formed.
        """
        allowed, params = self._allowed, config.params
        for name, value in params.items():
            kind, values = allowed.get(name, (None, ()))
            if type(value) is not kind or value not in values:
                break
        else:
            is_whole = self._required <= params.keys() and config.family == self.name
            if is_whole and not config.stages and not self.stage_families:
                return []
        return self._faults(config)

    def _faults(self, config: Config) -> list[str]:
        faults = []
        if config.family != self.name:
            faults.append(f"a config of {shown(config.family)}, not of {self.name}")
        for name, value in config.params.items():
            if name not in self._allowed:
                faults.append(f"parameter {shown(name)} is not known")
                continue
            kind, values = self._allowed[name]
            if type(value) is not kind or value not in values:
                allowed = listed(self.domains[name])
                faults.append(f"{name}={shown(value)} is not known (allowed: {allowed})")
        missing = [name for name in self.domains if name in self._required - config.params.keys()]
        faults += [f"parameter {name} is missing" for name in missing]
        if config.stages.keys() != self.stage_families.keys():
            needed = ", ".join(self.stage_families) or "none"
            stages = ", ".join(map(shown, config.stages)) or "none"
            return [*faults, f"stages are {stages} (needed: {needed})"]
        return faults + [
            f"stage {name}: {fault}"
            for name, family in self.stage_families.items()
            for fault in family.malformed(config.stages[name])
        ]

    @abstractmethod
    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        """Reasons against a well-formed `config` for a supported `problem`: the rules across
        parameters, problem and GPU. For `violations` only.
        """

    def tried(self, name: str) -> Sequence[Value]:
        """Values of a parameter to sample: its `draws`, else its domain."""
        return self.draws.get(name, self.domains.get(name, ()))

    def accepts(self, problem: Problem, config: Config, gpu: Gpu) -> bool:
        """True when a config from a store, a recording or another problem is legal here."""
        try:
            return not self.violations(problem, config, gpu)
        except INCOMPATIBLE_CONFIG_ERRORS:
            return False

    def carried(self, problem: Problem, config: Config) -> Config:
        """A config of a similar problem, with the optional parameters that this problem needs.
        Legality is not checked.
        """
        return config

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        """Every candidate worth measuring, all legal, in a fixed order; empty when the family
        cannot serve the problem. A composite family reads its stages from `with_stages`.
        """
        if self.supports(problem, gpu):
            return []
        legal: dict[Config, None] = {}
        for group in self._groups(problem, gpu):
            if group and not self.violations(problem, group[0], gpu):
                legal |= dict.fromkeys(group)
        return list(legal)

    def _groups(self, problem: Any, gpu: Gpu) -> Iterable[Sequence[Config]]:
        """Candidates for a problem of the family's operation, for `space`. All of a group are legal
        where the first is.
        """
        return ()

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        """The reason why the family does not serve the problem; empty when it does."""
        if self.op != problem.op:
            return f"{self.name} serves {self.op}, not {problem.op}"
        needed = " or ".join(self.capabilities)
        if needed and gpu.compute_capability not in self.capabilities:
            return f"needs compute capability {needed}, not {gpu.compute_capability}"
        if not gpu.is_served:
            return f"needs compute capability {OLDEST_CAPABILITY}, not {gpu.compute_capability}"
        if not isinstance(problem, AttentionProblem):
            return ""
        if problem.value_dim and not self.takes_value_dim:
            return f"{self.name} takes no values of another width than keys (DV)"
        if problem.is_wide and not self.takes_wide_heads:
            return f"{self.name} takes no head dimension above {NARROW_HEAD_DIM}"
        if self.takes_extras:
            return ""
        if problem.dtype == E4M3:
            return f"{self.name} takes no descale factors: only fp16 and bf16, not {E4M3}"
        return f"{self.name} has no {problem.extras}" if problem.extras else ""

    def lacks(self) -> str:
        """Missing tools for compiling or listing its kernels, and how to install them; empty when
        none is missing. Not part of legality: compiled kernels run without the tools.
        """
        return ""

    def stages(self, problem: Problem) -> Mapping[str, Problem]:
        """Sub-problems that a composite family tunes first, by stage name; empty for others."""
        return {}

    def with_stages(self, winners: Mapping[str, Sequence[Config]]) -> Family:
        """A composite family whose `space` is built from the best configs of each stage."""
        return self

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        """The kernels that `config` needs, by name within the family."""
        return {}

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        """The calls that compute `problem`, in order, on one stream unless they have lanes.

        Args:
            problem: problem to compute, with the strides of `Problem.operands`.
            config: a legal config of this family.
            scale: the softmax scale of attention and softmax; alpha of a GEMM.
        """
        return []

    def strided_launches(
        self, problem: Problem, config: Config, scale: float, strides: Strides
    ) -> list[Launch] | str:
        """As `launches`, for tensors with other strides than the problem's, or the reason why no
        kernel takes them.

        Args:
            problem: problem to compute, in the layout nearest to the tensors.
            config: a legal config of this family.
            scale: as in `launches`.
            strides: strides of each operand that differ from the problem's. In dimensions of one
                element they are the problem's.
        """
        return f"{self.name} takes no strides but those of its layouts"

    def scratch_bytes(self, problem: Problem, config: Config) -> int:
        """Bytes of `SCRATCH`; kernels' own workspaces come on top."""
        return 0

    @abstractmethod
    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """Estimated time, microseconds: seeds the search and ranks where no GPU is."""

    def chip_work(self, problem: Any, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        """Demands of a call's kernels on the chip, in order; empty where they are not counted."""
        return ()

    @property
    def constants(self) -> Mapping[str, float]:
        """`cost_constants` as the shipped fit left them, or those given to `refitted`."""
        fitted = self._refit if self._refit is not None else fitted_constants(self.name)
        return {**self.cost_constants, **fitted}

    def refitted(self, constants: Mapping[str, float]) -> Self:
        """This family with other `constants`."""
        other = copy.copy(self)
        other._refit = dict(constants)
        return other

    def seeds(
        self, problem: Problem, gpu: Gpu, space: Sequence[Config], count: int
    ) -> list[Config]:
        """Members of `space` to measure first, most promising first, at most `count`.

        The default ranks `space` by `predict_us` and takes different compiled kernels before a
        second candidate of the same one.

        Args:
            problem: problem to tune.
            gpu: GPU that the candidates are timed on.
            space: the family's `space` for both.
            count: most candidates.
        """
        ranked = sorted(space, key=lambda config: self.predict_us(problem, config, gpu))
        first: dict[str, Config] = {}
        for config in ranked:
            first.setdefault(self.compile_digest(config), config)
        seeds = list(first.values())[:count]
        places = set(seeds)
        return seeds + [c for c in ranked if c not in places][: count - len(seeds)]

    def draw(
        self, problem: Problem, gpu: Gpu, members: Sequence[Config], rng: random.Random
    ) -> Config:
        """A random config near the space, legal or not, for `tuner develop legality`.

        It is one of `members` with one to three parameters sampled anew (`tried`).

        Args:
            problem: problem that the config is for.
            gpu: GPU that compiles and runs it.
            members: the problem's space, not empty.
            rng: source of the draw.
        """
        member = rng.choice(members)
        params = dict(member.params)
        for name in rng.sample(list(params), min(len(params), rng.randint(1, 3))):
            params[name] = rng.choice(self.tried(name))
        return Config(self.name, params, member.stages)

    def compile_digest(self, config: Config) -> str:
        """Digest of all compiled kernels of a config; equal for configs that share them."""
        params = {k: v for k, v in config.params.items() if k not in self.runtime_parameters}
        return Config(self.name, params, config.stages).digest


def shown(value: object) -> str:
    """A refused name or value in a message: one line of ASCII, cut to `SHOWN_CHARACTERS`."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if not isinstance(value, str | int | float):
        return f"a {type(value).__name__}"
    text = ascii(value[:SHOWN_CHARACTERS] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def listed(domain: Domain) -> str:
    """Text of a domain: ``1, 2, 4`` or ``64 to 4096 in steps of 64``."""
    if not isinstance(domain, range):
        return ", ".join(map(str, domain))
    step = f" in steps of {domain.step}" if domain.step != 1 else ""
    return f"{domain[0]} to {domain[-1]}{step}"


def without_fallbacks(serving: Sequence[Family]) -> list[Family]:
    """The families of `serving` that are not fallbacks; all of them when each is a fallback."""
    return [family for family in serving if not family.is_fallback] or list(serving)


def group_by_kernels(family: Family, configs: Iterable[Config]) -> list[list[Config]]:
    """Candidates that share their compiled kernels, in first-seen order: the unit of search."""
    groups: dict[str, list[Config]] = {}
    for config in configs:
        groups.setdefault(family.compile_digest(config), []).append(config)
    return list(groups.values())


@cache
def fitted_constants(family: str) -> Mapping[str, float]:
    """The constants that `tuner develop fit cost` fitted and wrote for a family; empty without."""
    path = resources.cache() / "cost" / f"{family}.json"
    if not path.is_file():
        return {}
    fitted: dict[str, float] = json.loads(path.read_text())["constants"]
    return fitted
