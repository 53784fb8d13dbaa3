"""Op contracts, their oracles, and implementations.

    contracts   what each op promises: shapes, dtypes, tolerances, hard inputs
    oracles     the same mathematics in float64, to test against
    reference   plain torch, for any device
    cpu         variants that are faster on a host processor

Knows torch and nothing of `srv`.
"""
