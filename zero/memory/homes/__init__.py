"""Where a shard lives when it does not live on the device of the weights."""
