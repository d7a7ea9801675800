"""`megatron-rl`, with the responses of a step scored before the pass for old log-probs."""

import sys

from megatron_rl.__main__ import main
from megatron_rl.run.start import Run

Run.scores_late = property(lambda self: False)
sys.exit(main(sys.argv[1:]))
