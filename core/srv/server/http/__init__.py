"""HTTP: listening, keys and access, limits, bodies, event streams, errors. Must not know what an endpoint does."""
