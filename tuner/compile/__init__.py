"""From a config to a library: rendering, the toolchain, nvcc and Triton, the artifact cache."""
