"""Op contracts and their implementations."""
