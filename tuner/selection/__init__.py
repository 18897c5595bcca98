"""The read path: the measured or selected kernel for a problem.

The package is not called `lookup` because `tuner.lookup` is a function.
"""
