"""How each kind of model file says what its tokens are; `srv.server.tokenizer` chooses among them."""
