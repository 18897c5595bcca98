"""Runners evaluate candidates: on a GPU, from a recording, or by estimate."""
