"""The engine: its construction, its loop (plan, submit, apply), the process that it runs in, and its supervisor."""
