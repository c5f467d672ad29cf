"""The window: what `.grad` is between two steps."""
