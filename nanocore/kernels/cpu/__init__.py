"""The native CPU backend: C++ kernels, compiled once for each instruction set.

The C++ files are the kernels (`multiply.h` is the loop that all products share, `program.cpp` the
interface); `library` chooses and loads what this machine can run, `program` captures kernels to be
run without Python in between, and `cpu_backend` implements `interface.Kernels` with them.
"""
