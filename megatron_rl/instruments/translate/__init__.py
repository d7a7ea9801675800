"""Recipes of other projects, translated into ours: launch scripts and resolved configurations."""
