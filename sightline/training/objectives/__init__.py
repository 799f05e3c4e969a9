"""One file or folder per objective."""
