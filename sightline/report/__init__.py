"""From a run folder to one HTML file; needs no model."""
