"""An architecture and a method of 4-bit weights for `srv`, each in two files: facts without torch, and layers."""
