"""Readers for each kind of tokenizer file; `srv.server.text.tokenizer` chooses between them."""
