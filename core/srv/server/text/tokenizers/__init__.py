"""How each kind of model file says what its tokens are; `srv.server.text.tokenizer` chooses among them."""
