"""The API process: HTTP, protocols, what one request is, text to tokens and back, metrics and logs."""
