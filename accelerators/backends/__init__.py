"""Accelerators for the devices that torch has built in, each in a module that is imported when it is first tried."""
