"""vLLM seen from outside: how to start it, what it lacks, how to talk to its administration."""
