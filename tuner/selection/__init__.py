"""The read path: the decision that serves a problem, measured or selected.

`tuner.lookup` is a function, so the package around it has another name.
"""
