"""One sharded optimizer: building it, its step, its state, saving and loading it."""
