"""Oblivious transfers of the project's own: silent extension, and what protocols take of it."""
