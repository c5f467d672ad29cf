"""Names of other libraries on what is here, so that a script moves by changing an import."""
