"""Tools without any knowledge of kernels: data folders, JSON, files, text, processes, NVTX."""
