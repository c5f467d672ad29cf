"""Communication between ranks. Nothing here knows of parameters."""
