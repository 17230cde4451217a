"""Tests of what an NVIDIA GPU computes: `make gpu-tests`. In Triton's interpreter they run without one."""
