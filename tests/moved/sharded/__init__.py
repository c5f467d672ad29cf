"""The scripts of `plain` after they were moved by the docs."""
