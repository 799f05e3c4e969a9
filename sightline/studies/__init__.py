"""Experiments made of trainings and passes.

reinit   which blocks does fine-tuning build on?
"""
