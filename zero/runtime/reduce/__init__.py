"""Buckets fill with gradients, leave, and come back as sums."""
