"""Weight files: the headers of GGUF and safetensors files, and the loaders that fill a model's tensors from them."""
