"""Declarations of all server arguments, one module per group. No logic beyond the declarations.

A group is a named tuple: immutable like a frozen dataclass, but created in a tenth of the time, which every command
spends when it starts. Its annotations are evaluated, so these modules do not use `from __future__ import annotations`.
"""
