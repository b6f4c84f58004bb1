"""NOIR: the client keeps both ends of a model, the provider the middle."""
