"""The engine and its kernels on one NVIDIA GPU, beside the machine's limits and other engines."""
