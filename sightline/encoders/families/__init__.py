"""One file per family of architectures: where its sites are."""
