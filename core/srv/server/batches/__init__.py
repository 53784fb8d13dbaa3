"""Files that clients upload, and batches of requests that are read from them."""
