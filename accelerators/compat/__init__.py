"""Accelerators made of objects of other libraries."""
