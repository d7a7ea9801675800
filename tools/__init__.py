"""Programs for developers of this repository; what users run is `megatron-rl` (see `megatron_rl/commands`)."""
