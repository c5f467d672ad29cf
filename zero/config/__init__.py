"""Settings of one training: their schema, the names of optimizers and schedules, DeepSpeed's files."""
