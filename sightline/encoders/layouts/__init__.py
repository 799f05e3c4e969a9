"""What formats share: which encoder is in a file."""
