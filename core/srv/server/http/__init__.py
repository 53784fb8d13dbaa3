"""HTTP: limits, bodies, authentication, event streams, errors. Must not know any endpoint."""
