"""Triton kernels, each beside a reference in plain torch or NumPy. Nothing here is imported without Triton."""
