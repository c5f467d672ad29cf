"""What the contract suite, accelerators/testing.py, is made of beside its tests of one process."""
