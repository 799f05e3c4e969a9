"""Measures on arrays alone."""
