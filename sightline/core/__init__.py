"""What every room stands on: errors, files, random numbers, references, settings, run folders. No model, no image."""
