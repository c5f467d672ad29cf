"""The tools that people run from the command line, as subcommands of `python -m zero`."""
