"""Names of other libraries, so that a script moves by changing an import."""
