"""The native endpoint, with SGLang's names."""
