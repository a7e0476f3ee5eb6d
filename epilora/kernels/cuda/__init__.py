"""CUDA C++ kernels for sm_90 and newer, compiled at first use, and the driver calls that launch them."""
