"""Everything that is checked and decided before any memory is allocated."""
