"""Search: studies, samplers, surrogate, ranking and stopping; portfolios fitted to results."""
