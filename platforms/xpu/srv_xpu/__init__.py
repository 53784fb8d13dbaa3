"""The xpu platform of `srv`."""
