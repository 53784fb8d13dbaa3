"""The engine: the loop plan -> submit -> apply, its executors, and the process it runs in."""
