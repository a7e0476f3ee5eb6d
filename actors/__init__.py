"""Ray actors: thin shells around the plain classes of `epilora`."""
