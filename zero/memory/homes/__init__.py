"""Where state lives: on the device that computes, on the host beside it, or on disk. `home.py` has the protocol of all
homes."""
