"""The cuda platform of `srv`."""
