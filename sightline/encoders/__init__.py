"""What an encoder is, where it comes from, and how to look into it."""
