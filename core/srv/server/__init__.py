"""The API process: HTTP, protocols, tokenizing, incremental detokenizing, metrics."""
