"""What `python -m zero plan` reads and finds out."""
