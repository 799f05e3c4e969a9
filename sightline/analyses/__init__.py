"""One file or folder per analysis."""
