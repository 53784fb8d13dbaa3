"""OpenAI's APIs of generation, files and batches."""
