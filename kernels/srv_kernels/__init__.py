"""Op contracts, their oracles, and implementations.

    contracts   each op's shapes, dtypes, tolerances and test cases
    oracles     each op in float64, the expected results of tests
    reference   plain torch, for any device
    cpu         for CPUs: C++ kernels (`native`), and torch variants for installations without them

Depends on torch, but not on `srv`.
"""
