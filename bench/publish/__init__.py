"""The bench of publishing (`make bench-publish`): run.py plays the parts, one file each."""
