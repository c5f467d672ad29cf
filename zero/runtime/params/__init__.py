"""The table of parameters, their hooks, their place in flat memory, and what users do to them."""
