"""Endpoints of operators."""
