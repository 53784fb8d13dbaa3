"""The APIs: OpenAI, native, administration."""
