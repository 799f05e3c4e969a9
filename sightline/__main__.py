"""`python -m sightline` is the command `sightline`."""

from sightline.cli import main

main()
