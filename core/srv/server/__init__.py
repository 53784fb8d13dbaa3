"""The API process: HTTP, protocols, tokenization, incremental detokenization, metrics."""
