"""Compares a training with the same training in plain PyTorch."""
