"""A rank's life seen from outside: it joins, watches its worker, and says why the run ends. No torch below here."""
