"""Gradients handed over inside the compiled backward, and blocks with absent weights as one operator each."""
