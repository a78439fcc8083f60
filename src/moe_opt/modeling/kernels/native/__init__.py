"""Kernels in C++ for CPUs, compiled for the processor at hand when they are first needed."""
