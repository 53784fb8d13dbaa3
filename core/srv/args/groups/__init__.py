"""Declarations of all server arguments, a module a group. No logic beyond the declarations."""
