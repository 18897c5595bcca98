"""``scripts/sanitize``: kernels that the GPU tests prove, under compute-sanitizer.

::

    targets.py  which kernels of each family, and on which tiny problems
    watched.py  the process that launches them and is watched
    variants.py kernels with a change of their text, for racecheck
    tools.py    runs the tools over it, several at a time, and reads what they say
    command.py  arguments, compiling, the table

Everything goes through the contract of a family: no parameter of a launch is named here.
"""
