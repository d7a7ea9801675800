"""Analyses of a stored batch: the update again, the mismatch's causes, the bias of its gradient."""
