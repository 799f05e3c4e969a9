"""One file per source of encoders."""
