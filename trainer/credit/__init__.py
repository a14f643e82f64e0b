"""Credit rules, one pure function per file: episodes in, an advantage per choice out."""
