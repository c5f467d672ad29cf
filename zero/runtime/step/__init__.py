"""The optimizer step on this rank's shares, and publishing the new weights."""
