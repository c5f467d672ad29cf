"""The inputs of `python -m zero plan`, and what it computes from them."""
