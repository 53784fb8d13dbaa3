"""Speculative decoding: drafters, which propose tokens for the model to verify. Must not know plans or requests.

An algorithm is two files: its facts (`DraftAlgorithm`), which `srv plan` reads without torch, and its drafter, which a
worker imports.
"""
