"""The campaign: what one GPU can show, each in one command (docs/gpu.md). ``python -m tools.gpu r1 --out r1.json``."""
