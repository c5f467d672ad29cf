"""What ranks tell each other when a window settles, and what follows from it."""
