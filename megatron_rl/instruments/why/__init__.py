"""What changed in a run, when its metrics left their healthy stretch, and which causes fit."""
