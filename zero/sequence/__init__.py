"""Long sequences: attention over ranks that have a part of each sequence, batches that are cut so, and less memory."""
