"""The version of Sightline."""

__version__ = "0.1.0"
