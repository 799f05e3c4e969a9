"""Experiments made of trainings and passes."""
