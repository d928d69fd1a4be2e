"""A rank's life seen from inside: the process that has torch."""
