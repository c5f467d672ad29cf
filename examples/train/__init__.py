"""A training from the command line: `python examples/train`. docs/train.md says what it does and leaves."""
