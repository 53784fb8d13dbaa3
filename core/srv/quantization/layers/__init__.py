"""The layers of each scheme (`srv.quantization.schemes`), and their factory."""
