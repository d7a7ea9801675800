"""What tools/patches.py is made of. Standard library only: it runs before and right after `pip install`."""
