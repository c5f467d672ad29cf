"""Long sequences: attention over ranks that have a part of each sequence, batches that are cut so, and memory that does not grow."""
