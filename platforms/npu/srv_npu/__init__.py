"""The npu platform of `srv`."""
