"""Pages, the prefix tree, the cache over both (plain Python), and the pools of tensors behind them."""
