"""Wires: what ranks send each other. Nothing here has heard of a parameter."""
