"""Analyses of a stored batch: the update again, the mismatch's causes, its experts, the bias of its gradient."""
