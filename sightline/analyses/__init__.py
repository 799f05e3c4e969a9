"""One file per analysis."""
