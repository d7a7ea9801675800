"""What stands beside a run and is no part of it: plan, trace, lab, watch, and the analysis of recorded batches."""
