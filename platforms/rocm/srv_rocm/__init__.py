"""The rocm platform of `srv`."""
