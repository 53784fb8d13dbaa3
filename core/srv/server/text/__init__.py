"""Text to token ids and back: tokenizers, chat templates, threads for long texts, incremental detokenization."""
