"""One file per objective."""
