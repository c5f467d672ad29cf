"""Accelerators made of what other libraries have."""
