"""One file per image source."""
