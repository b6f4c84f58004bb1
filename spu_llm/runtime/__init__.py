"""Running plans: sessions, the executor, SPU."""
