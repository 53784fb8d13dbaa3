"""Test support that ships with `srv`, so that plugin authors can use it."""
