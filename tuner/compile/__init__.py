"""Compilation of kernels: rendering, the toolchain, nvcc and Triton, and the artifact cache."""
