"""Studies of split models (NOIR): protection, utility, cost."""
