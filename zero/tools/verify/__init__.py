"""The proof by trying: a training beside the same training in plain PyTorch."""
