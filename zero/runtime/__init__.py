"""Time: what happens when."""
