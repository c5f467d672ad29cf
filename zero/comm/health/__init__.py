"""Whether all ranks are still there, and the error when one is not."""
