"""Groups of ranks that compute together, and how work is divided among them. Values; imports no torch."""
