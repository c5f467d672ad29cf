"""The way of a step, from a gradient that is ready to the new weights of all ranks."""
