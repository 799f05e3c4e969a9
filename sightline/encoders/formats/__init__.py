"""One file per official checkpoint format."""
