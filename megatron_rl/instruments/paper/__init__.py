"""Measurements and figures of the papers, for your model and runs."""
