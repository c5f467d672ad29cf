"""Arithmetic of the step and of sums, C++ included."""
