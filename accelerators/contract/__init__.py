"""The parts of the contract suite, accelerators/testing.py, beside its tests of one process."""
