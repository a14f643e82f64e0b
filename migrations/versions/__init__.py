"""One file per released schema revision."""
