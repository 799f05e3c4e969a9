"""Experiments made of trainings and passes.

detection   how well are objects found by detectors on these encoders?
reinit      which blocks does fine-tuning build on?
"""
