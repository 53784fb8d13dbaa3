"""Messages between the API process and the engine process, and the channels that carry them."""
