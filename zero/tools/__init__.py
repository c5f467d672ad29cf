"""What people run from the command line, one module for each subcommand of `python -m zero`."""
