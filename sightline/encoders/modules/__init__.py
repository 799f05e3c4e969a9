"""Modules that are both loaded and trained."""
