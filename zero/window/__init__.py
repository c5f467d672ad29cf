"""The room of all that happens to gradients from one `zero_grad` to the next."""
