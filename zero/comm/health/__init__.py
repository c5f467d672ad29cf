"""Whether all ranks are still there, and what is said when one is not."""
