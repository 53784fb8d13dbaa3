"""Op contracts, their oracles, and implementations.

    contracts   what each op promises: shapes, dtypes, tolerances, hard inputs
    oracles     the same mathematics in float64, to test against
    reference   plain torch, for any device
    cpu         for host processors: C++ kernels (`native`), and torch variants for where those are not built

Knows torch and nothing of `srv`.
"""
