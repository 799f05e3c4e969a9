"""One file or folder per source of images."""
