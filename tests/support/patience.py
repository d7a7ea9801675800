"""How long tests wait for what a quiet machine does within seconds or minutes: a limit is for what hangs alone."""

PATIENCE_S = 900
