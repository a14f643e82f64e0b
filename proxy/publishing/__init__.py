"""How new weights go live: one owner among the proxies, load, probe, swap, drain."""
