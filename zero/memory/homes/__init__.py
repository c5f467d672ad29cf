"""Where state lives: on the device that computes, or on the host beside it. `home.py` has the protocol of both."""
