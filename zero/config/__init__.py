"""Settings of one training: their schema, what each optimizer and schedule is called, DeepSpeed's files."""
