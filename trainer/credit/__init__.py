"""Credit: what each episode's reward makes of each of its choices. One rule per file."""
