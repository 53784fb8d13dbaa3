"""Kernels for host processors."""
