"""Choice of the next candidate: studies, samplers, the surrogate, rules fitted to results."""
