"""One file per model source."""
