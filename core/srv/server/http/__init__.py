"""HTTP itself: limits, bodies, authentication, event streams, graceful shutdown. Knows no endpoint."""
