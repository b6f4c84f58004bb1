"""What is kept where nobody says how much: apart, so that commands' help need not load the rest."""

HINT_CACHE_BYTES = 20 * 10**9  # of a client's hints of all providers
