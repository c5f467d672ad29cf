"""Weights that are gathered before an operator uses them, and freed after."""
