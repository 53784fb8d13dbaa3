"""Op contracts, their oracles, and implementations.

    contracts   each op's shapes, dtypes, tolerances and test cases
    oracles     the same mathematics in float64, as a reference for tests
    reference   plain torch, for any device
    cpu         for host processors: C++ kernels (`native`), and torch variants for installations without them

Knows torch and nothing of `srv`.
"""
