"""Executors run plans: their protocol, the in-process executor, and the EngineSpec. Imports no torch."""
