"""What `python -m zero train` trains and shows."""
