"""Declarations of all server arguments, a module a group. No logic beyond the declarations.

A group is a named tuple: as frozen as a dataclass, and made in a tenth of the time, which every command waits for. Its
annotations are read as values, so these modules do not put them off (`from __future__ import annotations`).
"""
