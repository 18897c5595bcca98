"""What proves the fused attention kernels on a GPU.

::

    cases.py      which problems and inputs, drawn once and for all
    plan.py       which kernels, and which of them compute which case
    binding.py    a plan's config as a kernel that can be launched
    reference.py  inputs, attention in fp64 and the comparison, over torch tensors
    prover.py     runs one kernel on one case and says what is wrong with it

``tests/gpu/fused_attention_child.py`` is the process that does it. ``tests/gpu/sanitizer`` runs the
same kernels under compute-sanitizer.

Everything goes through the contract of a family: no parameter of a kernel is named here.
"""
