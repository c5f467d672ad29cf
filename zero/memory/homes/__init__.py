"""Homes of state: the device that computes, the host beside it, or a disk. `home.py` has the protocol of all homes."""
