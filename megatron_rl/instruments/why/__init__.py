"""Why a run became unstable: when each metric left its baseline, what went first, and what may have caused it."""
