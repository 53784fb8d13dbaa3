"""The cpu platform of `srv`."""
