"""A kernel family of your own: which configs it has, which are legal, and their CUDA text.

This one narrows the softmax family to one warp a row. A family with a template of its own has the
same methods; `docs/pages/family.md` adds one from an empty file to a tuned kernel.
"""

from collections.abc import Sequence

from tuner.compile.render import render
from tuner.config import Config
from tuner.families.softmax import Softmax
from tuner.hardware import Gpu, gpu_by_name
from tuner.problem import Problem, SoftmaxProblem


class WarpSoftmax(Softmax):
    """Softmax with 32 threads a row: no row waits at a barrier."""

    name = "warp_softmax"

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        """Every rule that a config breaks, a line each; none of them raises."""
        reasons = super().conflicts(problem, config, gpu)
        if config["threads_per_row"] != 32:
            reasons.append(f"threads_per_row={config['threads_per_row']} is not one warp")
        return reasons

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        """The candidates worth measuring, most promising first."""
        configs = [Config(self.name, config.params) for config in Softmax().space(problem, gpu)]
        legal = [config for config in configs if not self.violations(problem, config, gpu)]
        return sorted(legal, key=lambda config: self.predict_us(problem, config, gpu))


family, gpu = WarpSoftmax(), gpu_by_name("H200")
problem = SoftmaxProblem(rows=4096, cols=1024)
best = family.space(problem, gpu)[0]
print(f"{len(family.space(problem, gpu))} configs; first: {best}")
print(f"expected: {family.predict_us(problem, best, gpu):.1f} us")

wide = Config(family.name, {**best.params, "threads_per_row": 128})
print("refused:", family.violations(problem, wide, gpu)[0])

(spec,) = family.kernels(problem, best).values()
text = render(spec, "example")
print(f"{spec.template}: {len(text.splitlines())} lines of CUDA")
