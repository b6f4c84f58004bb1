"""Studies of private completions: what whole runs cost, and where that goes."""
