"""Whose call it is: the marks that it carries, the keys that stand for them, what it goes on from."""
