"""The one streaming pass."""
