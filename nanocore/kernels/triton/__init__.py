"""The kernels for CUDA, in Triton (Tillet et al., MAPL 2019)."""
