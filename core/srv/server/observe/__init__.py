"""What operators see of requests and the engine: metrics, traces, logs, dumps, hooks, ledgers. Must not know endpoints
or the format of any protocol."""
