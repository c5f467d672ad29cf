"""Gradients handed over inside the compiled backward."""
