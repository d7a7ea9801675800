"""Where vLLM and the learner part: every operator of each against the checkpoint, the first that departs named."""
