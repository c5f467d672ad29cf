"""Tensors: the flat line, this rank's shares of it, scratch. Nothing here has heard of another rank talking."""
